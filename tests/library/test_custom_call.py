"""The table of the custom calls' arrays, which is an interface of exported programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxconv._src.library import custom_call, native

# Operands and results of every call, in order. An exported program passes them by position, so a
# line here never changes: a call with another order or number of arrays needs another name.
CALLS = {
    "jaxconv_fprop": "lhs rhs -> out workspace",
    "jaxconv_dgrad": "lhs rhs -> out workspace",
    "jaxconv_wgrad": "lhs rhs -> out workspace",
    "jaxconv_fused": "x w scale bias residual -> y pre statistics workspace",
    "jaxconv_int8": "x w scale offset bias residual residual_scale -> y workspace",
    "jaxconv_normalise": "y mean scale offset -> z",
    "jaxconv_normalise_add": "y y2 shortcut mean mean2 scale scale2 offset offset2 -> result bits",
    "jaxconv_masked_sums": (
        "gradient gradient2 result bits y y2 mean mean2 scale offset -> masked sums"
    ),
    "jaxconv_moments": "y -> moments",
    "jaxconv_activated_sums": "y mean scale offset -> sums",
    "jaxconv_elementwise": " -> ",
    "jaxconv_max_pool": "x mean scale offset -> maxima places operands",
    "jaxconv_max_pool_gradient": "dy dy2 places y scale y_scale offset -> dx",
}


def test_names_and_order(native_cpu):
    listed = {
        target: f"{' '.join(operands)} -> {' '.join(results)}"
        for target, (operands, results) in native_cpu.arrays.items()
    }
    assert listed == CALLS


def test_every_library_handles_calls_of_the_table(platform, native_kernels):
    assert set(native_kernels.module.registrations()) <= set(CALLS)
    assert native_kernels.arrays.keys() == CALLS.keys()


def test_a_name_that_a_call_does_not_have(native_cpu):
    with pytest.raises(ValueError, match=r"jaxconv_int8: it has x, w, scale.*, not pre"):
        custom_call.called("cpu", "jaxconv_int8", {"pre": jnp.zeros(1)}, {})


def test_a_call_of_another_version(native_cpu):
    """A program with another number of arrays is refused; the message has both numbers."""
    key = "fprop f32:f32:f32 default b1 n1 g1 c1 k1 i2x2 f1x1 o2x2 s1x1 l1x1 d1x1 p0_0x0_0 bias"
    chosen = native_cpu.select(key, "native", "")
    assert chosen.instance

    def call(*operands):
        types = [jax.ShapeDtypeStruct((1, 2, 2, 1), np.float32)] * 2
        axes = {f"{name}_axes": np.arange(4) for name in ("lhs", "rhs", "out")}
        attributes = custom_call.plan_attributes(chosen, key) | axes
        return jax.ffi.ffi_call("jaxconv_fused", types)(*operands, **attributes)

    with jax.default_device(jax.devices("cpu")[0]):
        operands = [np.zeros((1, 2, 2, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32)]
        with pytest.raises(
            jax.errors.JaxRuntimeError,
            match="expected 5 operands and 4 results, got 2 operands and 2 results",
        ):
            jax.block_until_ready(jax.jit(call)(*operands))


def test_what_a_call_without_an_attribute_says(native_cpu):
    with jax.default_device(jax.devices("cpu")[0]):
        types = [jax.ShapeDtypeStruct((1, 2, 2, 1), np.float32)] * 2
        call = jax.ffi.ffi_call("jaxconv_fprop", types)
        with pytest.raises(jax.errors.JaxRuntimeError, match="attribute instance"):
            jax.block_until_ready(jax.jit(call)(jnp.zeros((1, 2, 2, 1)), jnp.zeros((1, 1, 1, 1))))


def test_no_library_no_call(monkeypatch):
    monkeypatch.setattr(native, "load", lambda name: native.Refusal(name, "not built"))
    with pytest.raises(AssertionError, match="where there are kernels"):
        custom_call.called("cpu", "jaxconv_fprop", {}, {})
