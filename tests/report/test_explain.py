"""``explain``: every convolution of a program with its kernel, or each kernel's refusal."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxconv

X = np.zeros((2, 8, 8, 4), np.float32)
W = np.zeros((3, 3, 4, 8), np.float32)
SQUARE = np.zeros((3, 3, 4, 4), np.float32)


def test_every_field(platform, native_kernels):
    explanation = jaxconv.explain(lambda x, w: jaxconv.conv(x, w, stride=2), X, W)
    (c,) = explanation.convolutions
    assert (c.op, c.platform, c.precision, c.count) == ("fprop", platform, "default", 1)
    assert c.operands == ("f32[2,8,8,4]", "f32[3,3,4,8]") and c.result == "f32[2,4,4,8]"
    assert c.problem.startswith("fprop f32:f32:f32 default b1 n2 g1 c4 k8 i8x8 f3x3 o4x4 s2x2")
    assert c.instance in native_kernels.kernels()
    assert c.flops == 2 * (2 * 4 * 4) * (3 * 3 * 4) * 8
    assert c.bytes == 4 * (X.size + W.size + 2 * 4 * 4 * 8)
    assert c.workspace_bytes == native_kernels.select(c.problem, "native", "").workspace_bytes
    assert c.microseconds >= 0 and c.xla_microseconds >= 0
    assert c.refusals == () and "test_explain.py" in c.source and "<lambda>" in c.source
    assert explanation.flops == c.flops and explanation.on_kernels == 1


def test_a_training_step(platform, native_kernels):
    def loss(x, w):
        return jnp.sum(jaxconv.conv(x, w, precision="highest") ** 2)

    explanation = jaxconv.explain(jax.grad(loss, (0, 1)), X, W)
    assert sorted(c.op for c in explanation.convolutions) == ["dgrad", "fprop", "wgrad"]
    assert {c.precision for c in explanation.convolutions} == {"highest"}
    text = str(explanation)
    assert all(c.instance in text for c in explanation.convolutions), text
    assert "3 of 3 convolutions on jaxconv's kernels, 100%" in text


def test_identical_convolutions_are_listed_one_by_one(platform, native_kernels):
    def chain(x, w):
        return jaxconv.conv(jaxconv.conv(x, w), w)

    assert [c.count for c in jaxconv.explain(chain, X, SQUARE).convolutions] == [1, 1]


def test_threads_explain_at_once(native_cpu):
    """Each thread lists its own program: lowering in one thread does not affect another."""
    barrier = threading.Barrier(4)
    counts: list[list[int]] = []

    def work(length: int) -> None:
        def chain(x, w):
            for _ in range(length):
                x = jaxconv.conv(x, w)
            return x

        with jax.default_device(jax.devices("cpu")[0]):
            for _ in range(10):
                barrier.wait()
                found = jaxconv.explain(chain, X, SQUARE).convolutions
                counts.append([length, *(c.count for c in found)])

    threads = [threading.Thread(target=work, args=(length,)) for length in (2, 4, 8, 16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 40
    assert all(found == [1] * length for length, *found in counts), counts


def test_functions_count_as_often_as_they_are_called(platform, native_kernels):
    @jax.jit
    def layer(x, w):
        return jaxconv.conv(x, w)

    @jax.jit
    def two(x, w):
        return layer(layer(x, w), w)

    def program(x, w):
        x = layer(two(two(x, w), w), w)
        return lax.fori_loop(0, 10, lambda _, y: jaxconv.conv(y, w), x)

    counts = sorted(c.count for c in jaxconv.explain(program, X, SQUARE).convolutions)
    assert counts == [1, 5], "a loop's body once, the layer once and four times by way of two"


@pytest.mark.parametrize("how", ["checkpoint", "cond", "scan", "while", "custom_vjp", "vmap"])
def test_convolutions_inside_other_constructs(platform, native_kernels, how):
    conv = jaxconv.conv

    @jax.custom_vjp
    def custom(x, w):
        return conv(x, w)

    custom.defvjp(lambda x, w: (conv(x, w), (x, w)), lambda _, dy: (dy, dy))
    programs = {
        "checkpoint": jax.checkpoint(conv),
        "cond": lambda x, w: lax.cond(x.sum() > 0, conv, lambda x, w: x, x, w),
        "scan": lambda x, w: lax.scan(lambda y, _: (conv(y, w), None), x, length=3)[0],
        "while": lambda x, w: lax.while_loop(lambda y: y.sum() > 0, lambda y: conv(y, w), x),
        "custom_vjp": custom,
        "vmap": lambda x, w: jax.vmap(lambda x: conv(x[None], w))(x),
    }
    (c,) = jaxconv.explain(programs[how], X, SQUARE).convolutions
    assert c.instance and c.count == 1


def test_a_function_that_is_inlined_in_two_places(platform, native_kernels):
    layer = jax.checkpoint(jaxconv.conv)
    explanation = jaxconv.explain(lambda x, w: layer(layer(x, w), w), X, SQUARE)
    assert explanation.on_kernels == 2


def test_arguments_on_several_devices(native_cpu):
    devices = jax.devices("cpu")
    mesh = jax.make_mesh((len(devices),), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(np.zeros((16, 8, 8, 4), np.float32), sharding)
    (c,) = jaxconv.explain(jaxconv.conv, x, W).convolutions
    assert c.instance and c.operands[0] == "f32[16,8,8,4]"


def test_arguments_on_an_explicit_mesh(native_cpu):
    """A convolution has one entry, and its parts on the devices have none."""
    devices = jax.devices("cpu")[:2]
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Explicit,), devices=devices)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
        w = jax.device_put(W, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        gradients = jax.grad(lambda x, w: jnp.sum(jaxconv.conv(x, w) ** 2), (0, 1))
        found = jaxconv.explain(gradients, x, w).convolutions
    assert sorted(c.op for c in found) == ["dgrad", "fprop", "wgrad"]
    assert all(c.instance and c.count == 1 for c in found)
    assert found[0].operands[0] == "f32[2@data,8,8,4]"


def test_symbolic_extents_print(native_cpu):
    (n,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((n, 8, 8, 4), np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        text = str(jaxconv.explain(jaxconv.conv, x, W))
    assert "symbolic shape" in text and "0 of 1" in text


def test_other_platforms_are_refused():
    with pytest.raises(ValueError, match="'cpu' or 'cuda', got 'tpu'"):
        jaxconv.explain(jaxconv.conv, X, W, platform="tpu")


def test_nothing_is_hidden_by_what_ran_before(platform, native_kernels):
    f = jax.jit(lambda x, w: jaxconv.conv(x, w))
    f(X, W)
    for _ in range(2):
        assert len(jaxconv.explain(f, X, W).convolutions) == 1


def test_reasons_one_for_each_refusing_kernel(platform, native_kernels):
    def f(x, w):
        return jaxconv.conv(x, w, algorithm="xla")

    (c,) = jaxconv.explain(f, X, W).convolutions
    assert c.instance is None and c.refusals == (("jaxconv", 'algorithm="xla" was asked for'),)
    text = str(jaxconv.explain(f, X, W))
    assert "0 of 1" in text and '  1  jaxconv: algorithm="xla" was asked for (row 1)' in text


def test_each_cpu_kernel_gives_its_reason(native_cpu):
    with jax.default_device(jax.devices("cpu")[0]):
        (c,) = jaxconv.explain(lambda x, w: jaxconv.conv(x, w, stride=8192), X, W).convolutions
    assert c.instance is None, "oneDNN is not trusted with such strides"
    kernels = [kernel for kernel, _ in c.refusals]
    assert len(kernels) == len(set(kernels)) >= 1 and all(reason for _, reason in c.refusals)


def test_lax_convolutions_are_listed_and_left_alone(platform, native_kernels):
    def f(x, w):
        y = lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jaxconv.conv(y, SQUARE)

    explanation = jaxconv.explain(f, X, SQUARE)
    assert [c.instance is None for c in explanation.convolutions] == [True, False]
    assert "install() nor override()" in str(explanation)
    with jaxconv.override():
        assert jaxconv.explain(f, X, SQUARE).on_kernels == 2
    assert jaxconv.explain(f, X, SQUARE).on_kernels == 1


def test_arguments_as_jit_takes_them(platform, native_kernels):
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W)]

    def f(params, *, x):
        return jaxconv.conv(x, params["w"])

    (c,) = jaxconv.explain(f, {"w": shapes[1]}, x=shapes[0]).convolutions
    assert c.instance


def test_a_program_without_convolutions():
    explanation = jaxconv.explain(jnp.sin, 1.0)
    assert explanation.convolutions == () and str(explanation) == "no convolutions"
    assert explanation.flops == explanation.on_kernels == 0


def test_another_platform(monkeypatch):
    """The kernels for a GPU, without a GPU; or the reason why there are no CUDA kernels."""
    monkeypatch.setenv("JAXCONV_TARGET", "sm_90a")
    with jax.default_device(jax.devices("cpu")[0]):
        (c,) = jaxconv.explain(lambda x, w: jaxconv.conv(x, w), X, W, platform="cuda").convolutions
    assert c.platform == "cuda"
    if c.instance is None:
        assert [kernel for kernel, _ in c.refusals] == ["jaxconv[cuda]"]
    else:
        assert c.instance.startswith("fprop_igemm")


@pytest.mark.parametrize("mapped", [(0, 0), (0, None), (None, 0)])
def test_mapped_convolutions_are_one_problem(platform, native_kernels, mapped):
    x, w = (
        np.zeros((3, *a.shape) if at == 0 else a.shape, a.dtype)
        for a, at in zip((X, W), mapped, strict=True)
    )
    (c,) = jaxconv.explain(jax.vmap(jaxconv.conv, mapped), x, w).convolutions
    assert (" b3 " in c.problem) == (mapped == (0, 0)) and " g1 " in c.problem
