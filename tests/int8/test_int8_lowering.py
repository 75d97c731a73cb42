"""Quantised convolutions are lowered to one call each, with nothing between layers."""

from __future__ import annotations

import functools
import logging
import re

import cpu_features
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from int8_reference import operands, requantized, sums, terms
from numerics import assert_exact
from problems import INT8, INT8_BY_NAME, problem

import jaxconv
from jaxconv import int8
from jaxconv._src.int8 import int8_primitive
from jaxconv._src.library import native

CALL = re.compile(r"custom_call @(\w+)\(")
P = INT8_BY_NAME["int8"]
X, W = operands(P, np.int8)
SCALE = terms(P, np.int8)["scale"]


@pytest.fixture
def cuda_target(monkeypatch):
    """Lowers for a Hopper GPU, present or not, if the CUDA kernels are built."""
    kernels = native.load("cuda")
    if isinstance(kernels, native.Refusal):
        pytest.skip(f"no CUDA kernels: {kernels.reason}")
    monkeypatch.setenv("JAXCONV_TARGET", "sm_90a")


def chain(y, filters, scale):
    for w in filters:
        y = int8.conv(y, w, scale, activation="relu")
    return y


def chain_operands(layout: str):
    p = problem("chain", (8, 7), 3, c=64, k=64, padding=1)
    x, w = operands(p, np.int8)
    filters = [int8.pack_filter(np.roll(w, i), data_format=layout) for i in range(4)]
    return (int8.pack(x) if layout == "NCHW32" else x), filters, np.full(64, 2e-4, np.float32)


# --- one call, and nothing else -------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHWC", "NCHW32"])
def test_a_chain_of_layers_is_calls_and_nothing_else_on_a_gpu(cuda_target, layout):
    lowered = jax.jit(chain).trace(*chain_operands(layout)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert CALL.findall(text) == [int8_primitive.TARGET] * 4
    operations = set(re.findall(r"= \"?(stablehlo\.\w+)", text))
    assert operations == {"stablehlo.custom_call", "stablehlo.constant"}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHWC", "NCHW32"])
def test_a_compiled_chain_of_layers_has_no_conversions(layout):
    text = jax.jit(chain).lower(*chain_operands(layout)).compile().as_text()
    assert len(re.findall(r'custom_call_target="jaxconv_int8"', text)) == 4
    for operation in ("transpose(", "copy(", "fusion("):
        assert operation not in text, text


@pytest.mark.optimized
@cpu_features.needs_vnni
def test_a_chain_on_the_cpu_converts_at_its_ends_only(native_cpu):
    """CPU kernels read NHWC; XLA cancels the conversions between layers."""
    operands = chain_operands("NCHW32")
    with jax.default_device(jax.devices("cpu")[0]):
        compiled = jax.jit(chain).lower(*operands).compile()
    text = compiled.as_text().split("ENTRY")[1]
    assert len(re.findall(r'custom_call_target="jaxconv_int8"', text)) == 4
    conversions = re.findall(r"= s8\[2,\S* (?:transpose|copy|fusion)\(", text)
    assert len(conversions) == 2, text


@pytest.mark.parametrize("layout", ["NHWC", "NCHW32"])
def test_every_problem_runs_on_a_kernel(platform, native_int8_kernels, layout):
    for p in INT8:
        if layout == "NCHW32" and p.rank != 2:
            continue
        x, w = operands(p, np.uint8)
        data_format = "NCHW32" if layout == "NCHW32" else "channels_last"
        filters = int8.pack_filter(
            w,
            groups=p.groups,
            data_format=data_format,
            filter_format={1: "WIO", 2: "HWIO", 3: "DHWIO"}[p.rank],
        )
        if layout == "NCHW32" and p.c > 4:
            x = int8.pack(x)

        def call(x, filters, p=p, data_format=data_format):
            return int8.conv(
                x,
                filters,
                np.float32(0.1),
                stride=p.stride,
                padding=p.padding,
                dilation=p.dilation,
                data_format=data_format,
            )

        (convolution,) = jaxconv.explain(call, x, filters).convolutions
        assert convolution.instance in native_int8_kernels.kernels(), convolution
        assert convolution.op == "fprop"


def test_the_key_tells_layouts_and_terms(cuda_target):
    given = terms(P, np.int8, of_image=True)
    residual = int8.pack(given.pop("residual"))

    def call(x, w, residual):
        return int8.conv(
            x, w, residual=residual, zero_point=3, out_zero_point=-7, activation="relu6", **given
        )

    explained = jaxconv.explain(call, int8.pack(X), int8.pack_filter(W), residual, platform="cuda")
    (convolution,) = explained.convolutions
    assert convolution.problem == (
        "fprop s8:s8:s8 default b1 n2 g1 c32 k64 i16x16 f3x3 o14x14 s1x1 l1x1 d1x1 p0_0x0_0 packed "
        "nchw32 image_scale offset bias residual relu6 z-7"
    )
    assert "imma" in convolution.instance and convolution.microseconds > 0
    assert convolution.flops == P.n * 14 * 14 * 9 * 32 * 64 * 2


def test_explain_says_why_not(platform):
    def call(x, w):
        return int8.conv(x, w, SCALE, algorithm="xla")

    (convolution,) = jaxconv.explain(call, X, W).convolutions
    assert convolution.instance is None
    assert convolution.refusals == (("jaxconv", 'algorithm="xla" was asked for'),)
    assert convolution.operands[1] == f"i8[{P.k},{9 * P.c}]"


def test_the_log_says_why_a_convolution_goes_to_xla(caplog):
    with caplog.at_level(logging.INFO, logger="jaxconv"):
        jax.jit(lambda x, w: int8.conv(x, w, SCALE, algorithm="xla")).lower(X, W)
    assert any('algorithm="xla"' in record.getMessage() for record in caplog.records)


def test_symbolic_shapes_go_to_xla():
    (n,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((n, *X.shape[1:]), np.int8)
    exported = jax.export.export(jax.jit(lambda x: int8.conv(x, W, SCALE)), platforms=["cpu"])(x)
    with jax.default_device(jax.devices("cpu")[0]):
        assert_exact(exported.call(X), requantized(sums(P, X, W), np.int8, scale=SCALE), "exported")


def test_export(platform, native_kernels):
    exported = jax.export.export(
        jax.jit(lambda x: int8.conv(x, W, SCALE)),
        disabled_checks=jaxconv.export.disabled_checks(),
    )(X)
    again = jax.export.deserialize(exported.serialize())
    assert_exact(again.call(X), requantized(sums(P, X, W), np.int8, scale=SCALE), "exported")


def test_a_checkpoint_policy_knows_the_primitive():
    def call(x, scale):
        q = jnp.round(x).astype(jnp.int8)
        y = int8.conv(q, W, jax.lax.stop_gradient(scale), out_dtype=jnp.float32)
        return jnp.sum(jnp.sin(y) * scale)

    saved = jax.checkpoint(call, policy=jaxconv.checkpoint_policies.convs_saveable)
    text = jax.make_jaxpr(jax.grad(saved, argnums=1))(X.astype(np.float32), SCALE)
    assert str(text).count("jaxconv_int8") == 1


@pytest.mark.parametrize("promotion", ["standard", "strict"])
def test_dtype_promotion_does_not_matter(promotion):
    with jax.numpy_dtype_promotion(promotion), jax.default_device(jax.devices("cpu")[0]):
        for algorithm in ("auto", "xla"):
            options = dict(zero_point=3, out_zero_point=5, algorithm=algorithm)
            call = functools.partial(int8.conv, **options)
            assert jax.jit(call)(X.view(np.uint8), W, SCALE, SCALE).dtype == np.int8


# --- lax's convolutions of int8 -------------------------------------------------------------------

LAX = [
    problem("plain", 8, 3, c=32, k=64, padding=1),
    problem("odd_channels", (8, 7), 3, c=20, k=10, padding=1, stride=2),
    problem("three_channels", 11, 7, c=3, k=32, padding=3, stride=2),
    problem("one_channel", 8, 3, c=1, k=5, padding=1),
    problem("pointwise", 5, 1, c=33, k=65),
    problem("lhs_dilation", (5, 4), 3, c=32, k=32, lhs_dilation=2, padding=1),
    problem("negative_padding", (9, 8), 3, c=32, k=32, padding=((-1, 2), (0, -2))),
    problem("both", (6, 5), 3, c=16, k=32, lhs_dilation=3, stride=2, padding=((2, -1), (1, 3))),
    problem("wide_groups", 6, 3, c=64, k=64, groups=2, padding=1),
    problem("narrow_groups", 6, 3, c=24, k=12, groups=3, padding=1),
    problem("depthwise", 6, 3, c=32, k=32, groups=32, padding=1),
    problem("odd_depthwise", (7, 6), 3, c=24, k=24, groups=24, padding=1, stride=2),
    problem("depth_multiplier", 6, 3, c=8, k=16, groups=8, padding=1),
    problem("1d", (15,), 5, c=32, k=32, padding=2),
    problem("3d", (3, 4, 5), 3, n=1, c=32, k=32, padding=1),
]
NUMBERS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def general(p, function, x, w, **options):
    return function(
        x,
        w,
        p.stride,
        p.padding,
        lhs_dilation=p.lhs_dilation,
        rhs_dilation=p.dilation,
        dimension_numbers=NUMBERS[p.rank],
        feature_group_count=p.groups,
        **options,
    )


@pytest.mark.parametrize("way", ["jaxconv", "override"])
@pytest.mark.parametrize("preferred", [np.int32, np.float32, None], ids=["s32", "f32", "s8"])
@pytest.mark.parametrize("p", LAX, ids=[p.name for p in LAX])
def test_lax_convolutions_of_int8(platform, p, preferred, way):
    """int32 sums, sums as float32, and the wrapping int8 of lax without a preferred type."""
    x, w = operands(p, np.int8)
    expected = requantized(sums(p, x, w), preferred or np.int8)
    ours = way == "jaxconv"
    function = jaxconv.conv_general_dilated if ours else jax.lax.conv_general_dilated
    with jaxconv.override(not ours):
        call = functools.partial(general, p, function, preferred_element_type=preferred)
        assert_exact(jax.jit(call)(x, w), expected, p.name)


def test_other_orders_of_axes(platform):
    p = LAX[1]
    x, w = operands(p, np.int8)
    y = jaxconv.conv_general_dilated(
        x.transpose(0, 3, 1, 2),
        w.transpose(3, 2, 0, 1),
        p.stride,
        p.padding,
        preferred_element_type=np.int32,
    )
    assert_exact(np.transpose(y, (0, 2, 3, 1)), sums(p, x, w), "NCHW")


@pytest.mark.parametrize("transpose_kernel", [False, True])
@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (2, 3)])
def test_conv_transpose_of_int8(platform, strides, transpose_kernel):
    x, w = operands(problem("p", (5, 6), (3, 4), c=20, k=33), np.int8)
    w = np.swapaxes(w, 2, 3) if transpose_kernel else w
    options = dict(transpose_kernel=transpose_kernel, preferred_element_type=np.int32)
    y = jaxconv.conv_transpose(x, w, strides, "SAME", **options)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.lax.conv_transpose(x, w, strides, "SAME", **options)
    assert_exact(y, expected, str(strides))


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)], ids=["x", "w", "both"])
def test_vmap_of_int8(platform, mapped):
    p = problem("p", (6, 5), 3, n=2, c=20, k=12, padding=1)
    examples = [operands(p, np.int8, seed) for seed in range(3)]
    stacked = [
        np.stack([e[i] for e in examples]) if at == 0 else examples[0][i]
        for i, at in enumerate(mapped)
    ]
    call = functools.partial(jaxconv.conv, padding=1, preferred_element_type=np.int32)
    actual = jax.jit(jax.vmap(call, in_axes=mapped))(*stacked)
    for i in range(3):
        x, w = (examples[i if at == 0 else 0][j] for j, at in enumerate(mapped))
        assert_exact(actual[i], sums(p, x, w), f"example {i}")


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32])
def test_other_integers(platform, dtype):
    """No kernel takes these; on a GPU XLA computes them as matrix products."""
    p = problem("p", (6, 5), 3, c=8, k=12, padding=1)
    x, w = (np.abs(a.astype(np.int32)).astype(dtype) for a in operands(p, np.int8))
    expected = sums(p, x, w)
    for wide in (None, np.uint32 if dtype == np.uint8 else np.int32):
        y = jaxconv.conv(x, w, padding=1, preferred_element_type=wide)
        assert_exact(y, expected.astype(wide or dtype), f"{dtype} -> {wide}")


def test_int8_of_lax_is_packed_on_a_gpu(cuda_target):
    """The program pads odd channels and makes the same call as int8.conv."""
    for p, c, k in ((LAX[0], 32, 64), (LAX[1], 32, 32), (LAX[2], 4, 32)):
        x, w = operands(p, np.int8)
        call = functools.partial(
            general, p, jaxconv.conv_general_dilated, preferred_element_type=jnp.int32
        )
        (convolution,) = jaxconv.explain(call, x, w, platform="cuda").convolutions
        assert f" c{c} k{k} " in convolution.problem and " packed" in convolution.problem
        assert "imma" in convolution.instance
        text = jax.jit(call).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
        assert CALL.findall(text) == ["jaxconv_int8"]


def test_auto_takes_the_depthwise_kernel_on_a_gpu(cuda_target):
    """For int8.conv, and for lax's convolution with int32 sums or with wrapping int8."""
    for name in ("depthwise", "odd_depthwise"):
        p = next(p for p in LAX if p.name == name)
        x, w = operands(p, np.int8)
        sums_of = functools.partial(
            general, p, jax.lax.conv_general_dilated, preferred_element_type=np.int32
        )
        wrapped = functools.partial(general, p, jax.lax.conv_general_dilated)
        fused = functools.partial(
            int8.conv, scale=np.float32(0.1), stride=p.stride, padding=p.padding
        )
        for function in (fused, sums_of, wrapped):
            with jaxconv.override():
                (convolution,) = jaxconv.explain(function, x, w, platform="cuda").convolutions
                lowered = jax.jit(function).trace(x, w).lower(lowering_platforms=("cuda",))
            assert convolution.instance.startswith("fprop_depthwise_int8_s8_64ch_"), convolution
            assert " g32 c32 k32 " in convolution.problem
            assert convolution.microseconds > 0
            assert CALL.findall(lowered.as_text()) == ["jaxconv_int8"]


def test_what_no_kernel_takes_is_a_matrix_product_on_a_gpu(cuda_target):
    """XLA:GPU compiles no integer convolution, so none may be left in the program."""
    for name in ("narrow_groups", "depth_multiplier"):
        p = next(p for p in LAX if p.name == name)
        x, w = operands(p, np.int8)
        for override in (False, True):
            function = jax.lax.conv_general_dilated if override else jaxconv.conv_general_dilated
            with jaxconv.override(override):
                call = functools.partial(general, p, function, preferred_element_type=jnp.int32)
                (convolution,) = jaxconv.explain(call, x, w, platform="cuda").convolutions
                lowered = jax.jit(call).trace(x, w).lower(lowering_platforms=("cuda",))
            assert convolution.instance is None and convolution.refusals
            assert "stablehlo.convolution" not in lowered.as_text()


def test_a_forced_kernel_that_refuses_says_why(platform, native_kernels):
    instance = next(name for name in native_kernels.kernels() if "_f16" in name and "fprop" in name)
    with pytest.raises(ValueError, match=rf"{instance}.*(s8|int8)"):
        jax.jit(lambda x, w: int8.conv(x, w, SCALE, algorithm=instance)).lower(X, W)


# --- the plan for lax's convolutions, on the CPU's kernels ----------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["as it is", "padded"])
@pytest.mark.parametrize("p", LAX, ids=[p.name for p in LAX])
def test_the_plan_computes_fprop_and_dgrad(p, padded):
    """The operations around the call on a GPU, checked with a call for the CPU."""
    import dataclasses

    from numerics import reference

    from jaxconv._src.int8 import int8_lax
    from jaxconv._src.problem.spec import Op

    depthwise = p.groups == p.c == p.k > 1
    if padded and p.groups > 1 and not depthwise:
        pytest.skip("channels in wider groups are not padded")
    rng = np.random.default_rng(0)
    x, w = operands(p, np.int8)
    dy = rng.integers(-128, 128, p.canonical_shape("y"), dtype=np.int8)
    spec = p.spec()
    with jax.default_device(jax.devices("cpu")[0]):
        for op, lhs in ((Op.FPROP, x), (Op.DGRAD, dy)):
            sizes = spec.sizes(op, lhs.shape, w.shape)
            plan = int8_lax.plan("cpu", op, spec, sizes, np.dtype(np.int32))
            if padded:
                c, k = (-(-e // 32) * 32 for e in (plan.c, plan.k))
                conv = dataclasses.replace(plan.spec.conv, groups=c if depthwise else 1)
                call = dataclasses.replace(plan.spec, conv=conv)
                plan = dataclasses.replace(plan, spec=call, c=c, k=k)
            actual = jax.jit(functools.partial(int8_lax.convolve, plan, op, spec=spec))(lhs, w)
            assert_exact(actual, reference(op, p, lhs, w).astype(np.int32), f"{op} {p.name}")


# --- qwix -----------------------------------------------------------------------------------------


def test_qwix_runs_its_convolutions_on_our_kernels(platform, native_int8_kernels):
    """Qwix calls lax's int8 convolution with int32 sums, and rescales by channel."""
    qwix = pytest.importorskip("qwix", reason="qwix is not installed")
    p = problem("p", (8, 7), 3, c=24, k=40)
    rng = np.random.default_rng(0)
    x = rng.standard_normal(p.canonical_shape("x")).astype(np.float32)
    w = rng.standard_normal(p.canonical_shape("w")).astype(np.float32)

    def call(x, w):
        return qwix.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    with jax.default_device(jax.devices("cpu")[0]):
        # Devices round divisions differently, so one of them quantises for both.
        quantised = (
            qwix.quantize(x, "int8", channelwise_axes=[0]),
            qwix.quantize(w, "int8", channelwise_axes=[3]),
        )
        expected = jax.jit(call)(*quantised)
    with jaxconv.override():
        actual = jax.jit(call)(*quantised)
        (convolution,) = jaxconv.explain(call, *quantised).convolutions
    assert convolution.instance in native_int8_kernels.kernels()
    np.testing.assert_allclose(actual, expected, rtol=1e-6)  # rounding of the float32 scales
    exact = jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest"
    )
    assert np.abs(actual - exact).max() < 0.05 * np.abs(exact).max()
