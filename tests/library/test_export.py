"""``jax.export``, ahead-of-time compilation, and rematerialisation policies."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import assert_exact

import jaxconv
from jaxconv._src.conv.primitives import PRIMITIVES


def integers(seed: int, *shapes) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]


X, W = integers(0, (2, 6, 6, 3), (3, 3, 3, 4))


def step(x, w):
    """A forward pass and both gradients."""
    y, vjp = jax.vjp(jaxconv.conv, x, w)
    return y, *vjp(jnp.sign(y))


def export(f, platform: str):
    names = {"cpu": "cpu", "cuda": "cuda"}
    return jax.export.export(
        jax.jit(f),
        platforms=[names[platform]],
        disabled_checks=jaxconv.export.disabled_checks(),
    )


def test_there_and_back(platform, native_kernels):
    exported = export(step, platform)(X, W)
    assert "jaxconv_wgrad" in exported.mlir_module()
    restored = jax.export.deserialize(exported.serialize())
    for a, b in zip(restored.call(X, W), jax.jit(step)(X, W), strict=True):
        assert_exact(a, b, "exported and restored")


def test_a_gradient_of_a_restored_function(platform, native_kernels):
    exported = export(jaxconv.conv, platform)(X, W)
    restored = jax.export.deserialize(exported.serialize(vjp_order=1))

    def loss(call):
        return jax.grad(lambda x, w: jnp.sum(call(x, w) ** 2), (0, 1))(X, W)

    for a, b in zip(loss(restored.call), loss(jaxconv.conv), strict=True):
        assert_exact(a, b, "gradient of a restored function")


def test_overridden_programs_too(platform, native_kernels):
    def f(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    with jaxconv.override():
        exported = export(f, platform)(X, W)
    assert "jaxconv_fprop" in exported.mlir_module()
    assert_exact(exported.call(X, W), jaxconv.conv(X, W), "exported under override")


def test_the_checks_are_needed(native_cpu):
    """Without the disabled checks, JAX refuses the custom calls."""
    with (
        jax.default_device(jax.devices("cpu")[0]),
        pytest.raises(ValueError, match="jaxconv_fprop"),
    ):
        jax.export.export(jax.jit(jaxconv.conv), platforms=["cpu"])(X, W)


def test_a_process_that_only_loads(native_cpu, tmp_path):
    """A process that only loads programs needs register(); otherwise XLA knows no such call."""
    with jax.default_device(jax.devices("cpu")[0]):
        exported = export(jaxconv.conv, "cpu")(X, W)
        expected = np.asarray(jaxconv.conv(X, W))
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "arrays.npz", x=X, w=W, y=expected)
    program = textwrap.dedent(
        """
        import pathlib, sys
        import jax, numpy as np
        jax.config.update("jax_platforms", "cpu")
        folder = pathlib.Path(sys.argv[1])
        if sys.argv[2] in ("register", "import"):
            import jaxconv
        if sys.argv[2] == "register":
            assert jaxconv.register()["cpu"] == ""
        call = jax.export.deserialize((folder / "program").read_bytes()).call
        arrays = np.load(folder / "arrays.npz")
        np.testing.assert_array_equal(call(arrays["x"], arrays["w"]), arrays["y"])
        """
    )

    def run(mode):
        command = [sys.executable, "-c", program, str(tmp_path), mode]
        return subprocess.run(command, capture_output=True, text=True)

    with_it, without, imported = map(run, ("register", "nothing", "import"))
    assert with_it.returncode == 0, with_it.stderr
    assert without.returncode != 0 and "jaxconv_fprop" in without.stderr
    assert imported.returncode != 0 and "Call jaxconv.register()" in imported.stderr


def test_register_says_what_is_missing():
    answers = jaxconv.register()
    assert set(answers) == {"cpu", "cuda"}
    for platform, reason in answers.items():
        assert bool(reason) == isinstance(jaxconv._src.library.native.load(platform), tuple)


def test_for_another_platform(monkeypatch):
    """Exporting for a GPU needs no GPU: uses the build's CUDA kernels, or XLA's convolution."""
    monkeypatch.setenv("JAXCONV_TARGET", "sm_90a")
    with jax.default_device(jax.devices("cpu")[0]):
        exported = export(jaxconv.conv, "cuda")(X, W)
    assert exported.platforms == ("cuda",)
    text = exported.mlir_module()
    assert ("jaxconv_fprop" in text) != ("stablehlo.convolution" in text)


def test_ahead_of_time(platform, native_kernels):
    compiled = jax.jit(step).trace(X, W).lower().compile()
    for a, b in zip(compiled(X, W), jax.jit(step)(X, W), strict=True):
        assert_exact(a, b, "compiled ahead of time")


# --- rematerialisation ----------------------------------------------------------------------------


def convolutions(jaxpr) -> int:
    """The number of convolutions that a program evaluates, by any primitive."""
    wanted = {*PRIMITIVES.values(), lax.conv_general_dilated_p}
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive in wanted
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                found += convolutions(inner)
    return found


@pytest.mark.parametrize("function", ["ours", "lax"])
def test_the_remat_policy_saves_convolutions(function):
    def conv(x, w):
        if function == "ours":
            return jaxconv.conv(x, w)
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def count(policy):
        def loss(x, w):
            return jnp.sum(jnp.sin(conv(jnp.sin(conv(x, w)), SQUARE)))

        checkpointed = jax.checkpoint(loss, policy=policy)
        return convolutions(jax.make_jaxpr(jax.grad(checkpointed, (0, 1)))(X, W).jaxpr)

    saved = count(jaxconv.checkpoint_policies.convs_saveable)
    assert count(jax.checkpoint_policies.everything_saveable) == saved == 5
    assert count(jax.checkpoint_policies.nothing_saveable) > saved


(SQUARE,) = integers(1, (3, 3, 4, 4))
