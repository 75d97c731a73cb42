"""Extreme sizes, algorithms that cannot serve, handlers with wrong buffers.

``adversary.py`` covers errors that are raised while JAX traces.
"""

from __future__ import annotations

import functools

import jax
import kernel_tables
import numpy as np
import pytest
from handler_errors import assert_refused
from jax import lax
from problems import BY_NAME, DTYPES

import jaxconv
from jaxconv._src.problem.spec import Op


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


X, W = zeros(2, 8, 8, 4), zeros(3, 3, 4, 6)


def traced(function, *arguments, **parameters):
    """Tracing alone must raise the error: nothing is compiled or run."""
    return jax.eval_shape(lambda: function(*arguments, **parameters))


NHWC = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


# --- algorithms that cannot serve -----------------------------------------------------------------


def test_an_algorithm_that_cannot_serve_says_why_and_what_could(native_cpu):
    """No kernel takes float64. The message has each kernel's reason and an alternative."""
    with jax.enable_x64(True):
        x, w = X.astype(np.float64), W.astype(np.float64)
        for family in native_cpu.module.families():
            with pytest.raises(ValueError) as raised:
                traced(jaxconv.conv, x, w, algorithm=family)
            message = str(raised.value)
            assert family in message and "float64" in message and "xla" in message


def test_an_algorithm_for_one_direction_is_checked_where_it_is_differentiated(native_cpu):
    """An instance of fprop does not constrain the gradients, whose kernels are chosen as usual."""
    fprop = native_cpu.module.select(BY_NAME["plain"].line(Op.FPROP, "f32"), "auto", "")[0]
    x, w = (zeros(*BY_NAME["plain"].canonical_shape(role)) for role in "xw")

    def loss(x, w):
        return jaxconv.conv(x, w, padding=1, algorithm=fprop).sum()

    with jax.default_device(jax.devices("cpu")[0]):
        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, w).as_text()
    assert "jaxconv_dgrad" in text and "jaxconv_wgrad" in text


# --- degenerate sizes: lax's answer ---------------------------------------------------------------

EMPTY = {
    "no images": ((0, 5, 5, 4), (3, 3, 4, 6), {}),
    "no input channels": ((2, 5, 5, 0), (3, 3, 0, 6), {}),
    "no output channels": ((2, 5, 5, 4), (3, 3, 4, 0), {}),
    "no rows": ((2, 0, 5, 4), (3, 3, 4, 6), {"padding": ((2, 2), (1, 1))}),
    "filter larger than the padded input": ((2, 4, 4, 4), (7, 3, 4, 6), {"padding": "VALID"}),
    "everything cropped": ((2, 4, 4, 4), (1, 1, 4, 6), {"padding": ((-2, -2), (0, 0))}),
}


@pytest.mark.parametrize("name", EMPTY)
def test_degenerate_sizes_give_what_lax_gives(platform, name):
    x_shape, w_shape, parameters = EMPTY[name]
    x, w = np.ones(x_shape, np.float32), np.ones(w_shape, np.float32)
    padding = parameters.get("padding", "SAME")

    def by(convolve):
        def run(x, w):
            numbers = ("NHWC", "HWIO", "NHWC")
            return convolve(x, w, (1, 1), padding, dimension_numbers=numbers)

        return run

    expected = jax.jit(by(lax.conv_general_dilated))(x, w)
    actual = jax.jit(by(jaxconv.conv_general_dilated))(x, w)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(jaxconv.conv(x, w, padding=padding), expected)
    # The gradients of an empty result are zeros with the operands' shapes.
    gradients = jax.jit(jax.grad(lambda *a: by(jaxconv.conv_general_dilated)(*a).sum(), (0, 1)))(
        x, w
    )
    for gradient, operand in zip(gradients, (x, w), strict=True):
        assert gradient.shape == operand.shape and not np.any(gradient)


# --- numbers beyond the kernels' index arithmetic: XLA's answer -----------------------------------

HUGE = [1_200_000_000, 2**31 - 1, 2**31, 2**40, 2**62]


@pytest.mark.parametrize("way", ["auto", "native", "xla", "override"])
@pytest.mark.parametrize("huge", HUGE)
def test_huge_strides_and_padding(huge, way):
    """Two windows: the first covers only padding, the second the first three elements."""

    def conv(x, w):
        if way == "override":
            numbers = ("NWC", "WIO", "NWC")
            return lax.conv_general_dilated(x, w, (huge,), [(huge, 0)], dimension_numbers=numbers)
        return jaxconv.conv(x, w, stride=huge, padding=[(huge, 0)], algorithm=way)

    def with_gradients(x, w):
        y, vjp = jax.vjp(conv, x, w)
        return y, *vjp(y)

    x, w = np.ones((1, 5, 1), np.float32), np.ones((3, 1, 1), np.float32)
    with jax.default_device(jax.devices("cpu")[0]), jaxconv.override(way == "override"):
        y, dx, dw = jax.jit(with_gradients)(x, w)
    assert y.ravel().tolist() == [0, 3]
    assert dx.ravel().tolist() == [3, 3, 3, 0, 0] and dw.ravel().tolist() == [3, 3, 3]


def test_a_huge_stride_of_integers():
    """One window, at position -4: no tap meets the input."""
    x, w = np.ones((1, 2, 2), np.int8), np.ones((2, 2, 1), np.int8)
    options = dict(stride=2**31 - 2, padding=[(4, 0)], preferred_element_type="int32")
    with jax.default_device(jax.devices("cpu")[0]):
        y = jaxconv.conv(x, w, **options)
    assert y.tolist() == [[[0]]]


@pytest.mark.parametrize("name", ["stride", "dilation", "padding"])
def test_numbers_beyond_64_bits_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: expected an integer of 64 bits, got {2**63}"):
        traced(jaxconv.conv, X, W, **{name: 2**63})


def test_padding_that_crops_more_than_there_is_is_refused_as_lax_does():
    padding = ((-5, -5), (0, 0))
    for function in (lax.conv_general_dilated, jaxconv.conv_general_dilated):
        with pytest.raises(ValueError, match="padding"):
            traced(function, X, W, window_strides=(1, 1), padding=padding, **NHWC)
    with pytest.raises(ValueError, match="padding"):
        traced(jaxconv.conv, X, W, padding=padding)


# --- handlers given buffers that do not match their attributes ------------------------------------

GOOD = dict(
    op=Op.FPROP,
    dtype="f32",
    lhs=None,
    rhs=None,
    out=None,
    instance=None,
    problem=None,
    workspace_bytes=None,
    slices=None,
    lhs_axes=(0, 1, 2, 3),
    rhs_axes=(0, 1, 2, 3),
    out_axes=(0, 1, 2, 3),
    drop=None,
)
PROBLEM = BY_NAME["stride_and_tail"]


def call_handler(kernels, **changes):
    """Calls a registered handler as the lowering does, with ``changes`` to its attributes."""
    given = {**GOOD, **changes}
    op, dtype = given["op"], given["dtype"]
    line = PROBLEM.line(op, dtype)
    instance, workspace_bytes, slices, *_ = kernels.module.select(line, "native", "")
    assert instance
    lhs, rhs, out = (PROBLEM.canonical_shape(role) for role in op.roles)
    operand, result = DTYPES[dtype]

    def default(name, value):
        return value if given[name] is None else given[name]

    lhs = default("lhs", zeros(*lhs, dtype=operand))
    rhs = default("rhs", zeros(*rhs, dtype=operand))
    out = default("out", jax.ShapeDtypeStruct(out, result))
    bytes_ = default("workspace_bytes", workspace_bytes)
    attributes = {
        "instance": default("instance", instance),
        "problem": default("problem", line),
        "slices": np.int64(default("slices", slices)),
        **{
            name: np.asarray(given[name], np.int64) for name in ("lhs_axes", "rhs_axes", "out_axes")
        },
    }
    attributes.pop(given["drop"], None)
    call = jax.ffi.ffi_call(f"jaxconv_{op.value}", (out, jax.ShapeDtypeStruct((bytes_,), np.uint8)))
    return jax.block_until_ready(jax.jit(lambda a, b: call(a, b, **attributes))(lhs, rhs))[0]


def shaped(role, change, dtype=np.float32):
    return zeros(
        *(e + c for e, c in zip(PROBLEM.canonical_shape(role), change, strict=True)), dtype=dtype
    )


LINE = PROBLEM.line(Op.FPROP, "f32")
MISMATCHES = {
    "x too small": (dict(lhs=shaped("x", (0, 0, -1, 0))), "x: expected shape"),
    "x too large": (dict(lhs=shaped("x", (1, 0, 0, 0))), "x: expected shape"),
    "x of another rank": (dict(lhs=zeros(2, 15, 294)), "x: expected"),
    "x of another dtype": (dict(lhs=shaped("x", (0,) * 4, np.int8)), "x: expected dtype f32"),
    "w too small": (dict(rhs=shaped("w", (0, 0, 0, -1))), "w: expected shape"),
    "w of another dtype": (dict(rhs=shaped("w", (0,) * 4, np.float16)), "w: expected dtype f32"),
    "result too small": (
        dict(out=jax.ShapeDtypeStruct((1, 1, 1, 1), np.float32)),
        "y: expected shape",
    ),
    "result of another dtype": (
        dict(out=jax.ShapeDtypeStruct(PROBLEM.canonical_shape("y"), np.int32)),
        "y: expected dtype f32",
    ),
    "axes that repeat": (dict(lhs_axes=(0, 1, 1, 3)), "x: expected axes"),
    "axes out of range": (dict(rhs_axes=(0, 1, 2, 9)), "w: expected axes"),
    "negative axes": (dict(out_axes=(-1, 1, 2, 3)), "y: expected axes"),
    "too few axes": (dict(lhs_axes=(0, 1, 2)), "x: expected axes"),
    "no axes": (dict(lhs_axes=()), "x: expected axes"),
    "axes that permute unlike the shape": (dict(lhs_axes=(0, 2, 1, 3)), "x: expected shape"),
    "unknown instance": (dict(instance="fprop_nothing_f32"), "fprop_nothing_f32"),
    "empty instance": (dict(instance=""), "instance"),
    "unreadable problem": (dict(problem="convolve this"), "problem"),
    "empty problem": (dict(problem=""), "problem"),
    "problem with wrong extents": (dict(problem=LINE.replace(" o8x7 ", " o8x8 ")), "output extent"),
    "problem of another operation": (dict(problem=PROBLEM.line(Op.DGRAD, "f32")), "dgrad"),
    "problem with a huge size": (
        dict(problem=LINE.replace(" n2 ", " n9223372036854775807 ")),
        "",
    ),
    "problem with a number beyond int64": (
        dict(problem=LINE.replace(" n2 ", " n99999999999999999999 ")),
        "n",
    ),
    "problem with groups that do not divide": (
        dict(problem=LINE.replace(" g1 ", " g2 ")),
        "groups",
    ),
    "problem with a stride of zero": (dict(problem=LINE.replace(" s2x2 ", " s0x2 ")), ""),
    "missing instance": (dict(drop="instance"), ""),
    "missing problem": (dict(drop="problem"), ""),
    "missing slices": (dict(drop="slices"), ""),
    "missing axes": (dict(drop="out_axes"), ""),
    "no slices": (dict(slices=0), ""),
    "negative slices": (dict(slices=-3), ""),
}


def test_the_handler_accepts_what_the_lowering_sends(platform, native_kernels):
    """Without changes the call succeeds; otherwise the refusals below would prove nothing."""
    for op in Op:
        assert call_handler(native_kernels, op=op).shape == PROBLEM.canonical_shape(op.roles[2])


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_handler_given_wrong_buffers_or_attributes_returns_an_error(
    platform, native_kernels, name
):
    changes, words = MISMATCHES[name]
    assert_refused(lambda: call_handler(native_kernels, **changes), words)


@pytest.mark.parametrize("op", Op)
def test_a_workspace_that_is_too_small_is_refused(platform, native_kernels, op):
    """For every operation that needs a workspace. The CPU's handler allocates its own."""
    line = PROBLEM.line(op, "f32")
    needed = native_kernels.module.select(line, "native", "")[1]
    if needed == 0:
        return
    if platform == "cpu":
        call_handler(native_kernels, op=op, workspace_bytes=needed - 1)
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*workspace"):
        call_handler(native_kernels, op=op, workspace_bytes=needed - 1)


def representatives(platform: str, kernels) -> list[str]:
    """One instance for each operation, device kernel and form; on the CPU every instance.

    Instances of a device kernel differ only in the table's numbers, and share the code that
    refuses.
    """
    if platform == "cpu":
        return list(kernels.kernels())
    first = {}
    for each in kernel_tables.all_instances():
        form = (each.op, each.family, each.source, each.padded, each.fused, each.dtype == "f32")
        first.setdefault(form, each.name)
    return list(first.values())


@pytest.mark.parametrize("op", Op)
def test_an_instance_of_another_operation_is_refused(platform, native_kernels, op):
    names = representatives(platform, native_kernels)
    others = [name for name in names if not name.startswith(f"{op.value}_")]
    assert others
    for instance in others:
        assert_refused(functools.partial(call_handler, native_kernels, op=op, instance=instance))


def test_an_instance_that_does_not_take_the_problem_is_refused(platform, native_kernels):
    """The handler repeats the checks of selection."""
    tried = 0
    for op in Op:
        line = PROBLEM.line(op, "f32")
        for instance in representatives(platform, native_kernels):
            if not instance.startswith(f"{op.value}_"):
                continue
            if native_kernels.module.select(line, instance, "")[0]:
                continue
            tried += 1
            call = functools.partial(call_handler, native_kernels, op=op, instance=instance)
            assert_refused(call)
    assert tried
