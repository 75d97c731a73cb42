"""``algorithm="winograd"``: exact on scaled integers, errors as stated, refusals with reasons."""

from __future__ import annotations

import functools
import itertools
import math
import shutil
import subprocess
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cc_programs import CC
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec
from jax.test_util import check_grads
from numerics import assert_exact, error, into_poison, normal_operands, reference
from problems import BASIC, BATCHED, BY_NAME, EDGE, problem
from winograd_errors import Case, Measurement

import jaxconv
from jaxconv._src.conv import primitives
from jaxconv._src.problem.spec import Op
from jaxconv._src.ways import winograd_jax
from jaxconv._src.ways.winograd_points import POINTS, matrices
from jaxconv.bench.problem import DTYPES

NHWC = ("NHWC", "HWIO", "NHWC")
OPS = (Op.FPROP, Op.DGRAD)
NAMED = [name for name in winograd_jax.ALGORITHMS if name != "winograd"]


def takes(p) -> bool:
    return (
        p.rank == 2 and p.window == (3, 3) and (*p.stride, *p.dilation, *p.lhs_dilation) == (1,) * 6
    )


PROBLEMS = [
    *filter(takes, (*BASIC, *EDGE, *BATCHED)),
    problem("wider_padding", (4, 6), 3, padding=((4, 6), (3, 0))),
    problem("one_row_of_tiles", (3, 25), 3, padding=((0, 2), (5, 1))),
]


# --- the matrices ---------------------------------------------------------------------------------


@pytest.mark.parametrize("m", POINTS)
def test_the_matrices_convolve_exactly_and_never_grow(m):
    made = matrices(m)

    def of(matrix, vector):
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    for i in range(m + 2):  # unit vectors: the algorithm is bilinear
        for j in range(3):
            d = [Fraction(i == k) for k in range(m + 2)]
            g = [Fraction(j == k) for k in range(3)]
            y = of(made.at, [u * v for u, v in zip(of(made.g, g), of(made.bt, d), strict=True)])
            assert y == [sum(d[p + r] * g[r] for r in range(3)) for p in range(m)]
    for row in (*made.bt, *made.g):
        assert Fraction(1, 2) < sum(map(abs, row)) <= 1


def test_the_matrices_are_the_library_s(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "matrices.cc"
    program.write_text(
        """
        #include <cstdio>
        #include "core/winograd.h"
        template <int m> void Print() {
          const auto& t = jaxconv::winograd::kTransform<m>;
          for (const auto& row : t.bt) for (float e : row) std::printf("%a ", e);
          for (const auto& row : t.g) for (float e : row) std::printf("%a ", e);
          for (const auto& row : t.at) for (float e : row) std::printf("%a ", e);
          std::printf("\\n");
        }
        int main() { Print<2>(); Print<4>(); Print<6>(); }
        """
    )
    built = tmp_path / "matrices"
    subprocess.run([compiler, "-std=c++17", f"-I{CC}", program, "-o", built], check=True)
    printed = subprocess.run([built], capture_output=True, text=True, check=True).stdout
    for m, line in zip(POINTS, printed.splitlines(), strict=True):
        ours = [float(np.float32(e)) for matrix in matrices(m) for row in matrix for e in row]
        assert [float.fromhex(text) for text in line.split()] == ours, m


# --- exact ----------------------------------------------------------------------------------------


def scale(algorithm: str) -> int:
    """The weight that makes U of integers integral: G's common denominator, for each dimension."""
    tile = winograd_jax.TILES[algorithm.removeprefix("winograd_")]
    return math.prod(
        math.lcm(*(e.denominator for row in matrices(m).g for e in row)) for m in tile if m > 1
    )


@functools.lru_cache(maxsize=64)
def scaled_integers(op: Op, p, weight: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Activations of -1, 0 and 1; a filter of -weight, 0 and weight. Long sums are sparse.

    U and V are then exact in float16, and M in float32.
    """
    rng = np.random.default_rng(len(p.name))
    density = min(1.0, 64 / p.reduction(op))
    lhs, w = (rng.integers(-1, 2, p.canonical_shape(role)) for role in op.roles[:2])
    lhs = lhs * (rng.random(lhs.shape) < density)
    return lhs, w * weight, reference(op, p, lhs, w * weight)


def check_exact(p, dtype, algorithm: str, layout: str = "last") -> None:
    """Checks both operations in one program, because compiling takes most of the time."""
    operands, expected, spec = [], [], p.spec(algorithm=algorithm, layout=layout)
    for op in OPS:
        lhs, rhs, result = scaled_integers(op, p, scale(algorithm))
        for role, array in zip(op.roles, (lhs, rhs), strict=False):
            operands.append(p.to_layout(role, array.astype(dtype), layout))
        expected.append(result.astype(np.float32))

    def both(x, w, dy, again):
        bind = functools.partial(primitives.bind, spec=spec, out_dtype=np.float32)
        return bind(Op.FPROP, x, w), bind(Op.DGRAD, dy, again)

    for op, result, right in zip(OPS, into_poison(both, *operands), expected, strict=True):
        result = p.to_canonical(op.roles[2], result, layout)
        repro = f"{algorithm} {op.value} {p.name} {np.dtype(dtype).name} {layout}"
        if algorithm == "winograd_f4x4":
            # A few sums of its output transform need more than 24 bits. M is a multiple of 1/256
            # and A^T of 2, so an error in any element of U, V or M changes the result by at least
            # 1/64. With float32 operands U is not rounded to 11 bits, and the filter's weight does
            # not make it exact.
            allowed = 1e-6 * np.abs(right).max() if dtype == np.float32 else 0
            assert np.abs(result - right).max() < 1 / 256 + allowed, repro
        elif algorithm == "winograd_f4x3" and jax.default_backend() == "gpu":
            # On an H200 XLA's sums round the last bit of float32; an error would be at least 1.
            assert np.abs(result - right).max() <= 1e-6 * np.abs(right).max(), repro
        else:
            assert_exact(result, right, repro)


EXACT = ("winograd_f2x2", "winograd_f4x4", "winograd_f4x3")


@pytest.mark.parametrize("algorithm", EXACT)
@pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: p.name)
def test_exact(platform, algorithm, p):
    # The types alternate, so that every problem and every algorithm runs in both.
    dtype = (np.float16, jnp.bfloat16)[(PROBLEMS.index(p) + EXACT.index(algorithm)) % 2]
    check_exact(p, dtype, algorithm)


@pytest.mark.parametrize("algorithm", ["winograd_f2x2", "winograd_f4x4"])
@pytest.mark.parametrize("name", ["plain", "lines_groups"])
def test_exact_in_float32(platform, algorithm, name):
    check_exact({p.name: p for p in PROBLEMS}[name], np.float32, algorithm)


@pytest.mark.parametrize("layout", ["first", "krsc"])
@pytest.mark.parametrize("name", ["groups", "batched_groups"])
def test_exact_in_other_layouts(platform, name, layout):
    check_exact({p.name: p for p in PROBLEMS}[name], np.float16, "winograd_f2x2", layout)


def test_taps_that_cancel_leave_nothing():
    """3 a - a - 2 a is 0, but rounding 3 a, or contracting it to an FMA, leaves a rest."""
    taps = list(itertools.product(range(-7, 8), repeat=3))
    w = jnp.broadcast_to(jnp.asarray(taps, jnp.float32).T[None], (3, 3, len(taps)))
    for m in POINTS:
        u, _ = winograd_jax.filter_transform(w, winograd_jax.Tile(1, m))
        exact = [
            [sum(a * b for a, b in zip(row, t, strict=True)) for t in taps] for row in matrices(m).g
        ]
        np.testing.assert_allclose(u[0], np.array(exact, float), rtol=2e-7, atol=0)


# --- accurate as stated ---------------------------------------------------------------------------


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_errors_are_those_stated(platform, dtype):
    measurement = Measurement(seed=1)
    for tile in winograd_jax.TILES:
        found = measurement(Case(tile, dtype, 64))
        (c,) = jaxconv.explain(
            functools.partial(jaxconv.conv, algorithm=f"winograd_{tile}"),
            *(jax.ShapeDtypeStruct(s, DTYPES[dtype]) for s in ((1, 24, 24, 64), (3, 3, 64, 64))),
        ).convolutions
        assert found.rms < 1.2 * c.rms_error, (tile, found)


@pytest.mark.optimized
def test_the_error_stated_of_tf32_is_that_of_u_and_v_in_11_bits(monkeypatch):
    """A GPU multiplies float32 operands at DEFAULT so; here the test rounds U and V."""

    def rounded(subscripts, *operands, einsum=jnp.einsum, **options):
        operands = (lax.reduce_precision(a, exponent_bits=8, mantissa_bits=10) for a in operands)
        return einsum(subscripts, *operands, **options)

    monkeypatch.setattr(winograd_jax.jnp, "einsum", rounded)
    measurement = Measurement(seed=1)
    for tile in winograd_jax.TILES:
        stated = winograd_jax.rms_error(f"fprop_winograd_f32_{tile[1:]}_jax", "cuda", "default")
        # A separate program for every tile, compiled while einsum is replaced by a rounding one.
        found = measurement(Case(tile, "f32", 64))
        assert stated / 1.1 < found.rms < 1.1 * stated, (tile, found)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("algorithm", NAMED)
def test_float32_and_the_default_tile(op, algorithm):
    """float32 operands stay float32; the family takes the tile with the fewest multiplications."""
    p = BY_NAME["prime_extents"]
    lhs, rhs = normal_operands(op, p, "f32")
    exact = reference(op, p, lhs, rhs)
    with jax.default_device(jax.devices("cpu")[0]):
        actual = p.operation(op, "f32", algorithm=algorithm)(lhs, rhs)
    assert error(actual, exact) < 1e-5
    for extents, tile in (((4, 4), (4, 4)), ((2, 2), (2, 2)), ((2, 4), (2, 2)), ((7, 9), (4, 4))):
        spec = problem("", extents, 3, padding=1).spec(algorithm="winograd")
        assert winograd_jax.tile_of(op, spec) == tile, extents


@pytest.mark.parametrize("sizes", [(1e30, 1e-25), (1e-36, 3e38), (3e38, 0.0)])
def test_bfloat16_of_any_magnitude(sizes):
    """Operands beyond float16's range are scaled by powers of two, which round nothing."""
    p = BY_NAME["one_image"]
    x, w = normal_operands(Op.FPROP, p, "bf16")
    y = p.operation(Op.FPROP, "f32", algorithm="winograd_f4x4")
    size_x, size_w = (np.float32(s) for s in sizes)
    x, w = (x.clip(-1, 1).astype(np.float32) * size_x), (w.clip(-1, 1).astype(np.float32) * size_w)
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    exact = reference(Op.FPROP, p, x, w)
    with jax.default_device(jax.devices("cpu")[0]):
        actual = np.asarray(y(x, w))
    np.testing.assert_allclose(actual, exact, rtol=0, atol=0.02 * np.abs(exact).max())


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32])
def test_nan_and_inf_spread_to_their_tiles_at_most(dtype, value):
    x, w = np.ones((2, 8, 8, 8), dtype), np.full((3, 3, 8, 8), 0.25, dtype)
    clean = jaxconv.conv(x, w, algorithm="winograd_f4x4")
    x[1, 5, 2, 3] = value  # outputs (4:7, 1:4) read it: only the tile (4:8, 0:4)
    y = np.asarray(jaxconv.conv(x, w, algorithm="winograd_f4x4"))
    spoilt = ~np.isfinite(y.astype(np.float32))
    assert spoilt[1, 4:7, 1:4].all()
    spoilt[1, 4:8, :4] = False
    assert not spoilt.any()
    elsewhere = np.ones(y.shape, bool)
    elsewhere[1, 4:8, :4] = False
    np.testing.assert_array_equal(y[elsewhere], np.asarray(clean)[elsewhere])


def test_the_same_bits_in_every_run():
    p = BY_NAME["prime_extents"]
    for dtype in ("bf16", "f32"):
        lhs, rhs = normal_operands(Op.FPROP, p, dtype)
        runs = [p.operation(Op.FPROP, dtype, algorithm="winograd")(lhs, rhs) for _ in range(2)]
        np.testing.assert_array_equal(*map(np.asarray, runs))


# --- as any other algorithm -----------------------------------------------------------------------


def draw(*shapes, dtype=np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("algorithm", ["winograd_f4x4", "winograd_f4x3"])
def test_gradients_to_the_second_order(algorithm):
    x, w = draw((2, 5, 6, 4), (3, 3, 2, 6))
    conv = functools.partial(jaxconv.conv, groups=2, padding=((0, 2), (1, 1)), algorithm=algorithm)
    check_grads(conv, (x, w), order=2, modes=("fwd", "rev"), atol=0.05, rtol=0.05)
    text = str(jaxconv.explain(jax.grad(lambda x, w: conv(x, w).sum(), (0, 1)), x, w))
    assert "dgrad_winograd_f32" in text and "wgrad_winograd" not in text


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_second_derivatives_beside_the_direct_convolution_s(dtype):
    x, w = draw((2, 8, 8, 8), (3, 3, 8, 8), dtype=dtype)

    def second(algorithm):
        def loss(x, w):
            y = jaxconv.conv(x, w, algorithm=algorithm)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.jit(lambda x, w: jax.jvp(jax.grad(loss, (0, 1)), (x, w), (x, w))[1])

    for ours, theirs in zip(second("winograd_f4x4")(x, w), second("xla")(x, w), strict=True):
        exact = np.asarray(theirs).astype(np.float64)
        # Two convolutions with roundings: bfloat16's own error is 1.7e-3, that of F(4x4) 2.4e-3.
        assert error(ours, exact) < (8e-3 if dtype == jnp.bfloat16 else 1e-5)


def test_vmap_over_either_operand_and_both():
    x, w = draw((3, 2, 6, 5, 4), (3, 3, 3, 4, 6))
    conv = functools.partial(jaxconv.conv, algorithm="winograd_f4x4")
    for axes in ((0, None), (None, 0), (0, 0)):
        a, b = (array if at == 0 else array[0] for array, at in zip((x, w), axes, strict=True))
        ours = jax.jit(jax.vmap(conv, axes))(a, b)
        theirs = jax.vmap(jaxconv.conv, axes)(a, b)
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        (c,) = jaxconv.explain(jax.vmap(conv, axes), a, b).convolutions
        assert c.instance == "fprop_winograd_f32_4x4_jax"


def test_sharded_over_eight_devices():
    x, w = draw((8, 6, 6, 4), (3, 3, 4, 8))
    devices = jax.devices("cpu")
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)

    def step(x, w):
        y, vjp = jax.vjp(functools.partial(jaxconv.conv, algorithm="winograd"), x, w)
        return y, *vjp(jnp.cos(y))

    expected = jax.jit(step)(x, w)
    sharded = jax.device_put(x, NamedSharding(mesh, Spec("data")))
    compiled = jax.jit(step).lower(sharded, w).compile()
    text = compiled.as_text()
    assert " all-gather" not in text and text.count(" all-reduce(") == 1
    mapped = jax.shard_map(
        lambda x, w: step(x, w)[:2],
        mesh=mesh,
        in_specs=(Spec("data"), Spec()),
        out_specs=Spec("data"),
    )
    for actual in (compiled(sharded, w), jax.jit(mapped)(x, w)):
        for ours, theirs in zip(actual, expected, strict=False):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_transposed_convolution():
    x, w = draw((2, 6, 5, 4), (3, 3, 4, 6))
    ours = jaxconv.conv_transpose(x, w, (1, 1), "SAME", algorithm="winograd")
    np.testing.assert_allclose(ours, lax.conv_transpose(x, w, (1, 1), "SAME"), atol=1e-4)
    with pytest.raises(ValueError, match="stride 2x2; Winograd takes 1x1"):
        jaxconv.conv_transpose(x, w, (2, 2), "SAME", algorithm="winograd")


@pytest.mark.parametrize(
    ("x_shape", "w_shape"), [((0, 5, 5, 4), (3, 3, 4, 6)), ((2, 5, 5, 0), (3, 3, 0, 6))]
)
def test_no_elements(x_shape, w_shape):
    x, w = np.ones(x_shape, np.float32), np.ones(w_shape, np.float32)
    y = jax.jit(functools.partial(jaxconv.conv, algorithm="winograd_f4x4"))(x, w)
    assert y.shape == (*x_shape[:3], 6) and not np.any(y)


# --- refused, with the reason ---------------------------------------------------------------------

X, W = np.zeros((2, 8, 8, 4), np.float32), np.zeros((3, 3, 4, 6), np.float32)
REFUSED = {
    "stride": (X, W, dict(stride=(1, 2)), "stride 1x2; Winograd takes 1x1"),
    "dilation": (X, W, dict(dilation=2), "dilation 2x2; Winograd takes 1x1"),
    "window": (X, np.zeros((3, 5, 4, 6), "f"), {}, "filter 3x5; Winograd takes 3x3"),
    "rank": (X[0], W[0], {}, "1 spatial axes; Winograd takes 2"),
    "precision": (
        X,
        W,
        dict(precision="highest"),
        "precision highest: Winograd's error in ",
    ),
    "dtype": (X.astype(np.int8), W.astype(np.int8), {}, "operands of int8; Winograd takes float16"),
}


@pytest.mark.parametrize("algorithm", ["winograd", "winograd_f4x3"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_take_raises(name, algorithm):
    x, w, options, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"algorithm '{algorithm}' cannot serve.*: {reason}"):
        jax.eval_shape(functools.partial(jaxconv.conv, algorithm=algorithm, **options), x, w)


def test_16_bit_operands_at_any_precision():
    for dtype in (np.float16, jnp.bfloat16):
        conv = functools.partial(jaxconv.conv, algorithm="winograd", precision="highest")
        (c,) = jaxconv.explain(conv, X.astype(dtype), W.astype(dtype)).convolutions
        assert "_winograd_" in c.instance


def test_tiles_are_read_from_names():
    names = {
        "winograd": "",
        "winograd_f4x3": "f4x3",
        "dgrad_winograd_bf16_2x2_four_stage_128x128x64": "f2x2",
        "fprop_winograd_f16_6x3_fused_row_64x128x64": "f6x3",
        "fprop_winograd_f32_6x6_jax": "f6x6",
        "fprop_igemm_wgmma_bf16_128x128x64_pingpong": "",
    }
    assert {name: winograd_jax.tile_named(name) for name in names} == names
    stated = winograd_jax.largest_rms_error
    assert stated("bf16", "f4x4", "default") == 2.9e-3 and stated("bf16", "", "default") == 0
    assert stated("f16", "f6x3", "default") == stated("f16", "f6x6", "default")
    half = "fprop_winograd_bf16_4x4_four_stage_128x128x64_pingpong_half"
    assert winograd_jax.rms_error(half, "cuda", "default") == stated("bf16", "f4x4", "default")
    assert winograd_jax.rms_error(half.removesuffix("_half"), "cuda", "default") == 2.4e-3
    assert stated("f32", "f2x2", "default") > stated("f32", "f2x2", "high")


def test_an_unknown_tile_is_refused():
    with pytest.raises(ValueError, match=r"'winograd_f8x8' is not in this build.*'winograd_f4x4'"):
        jaxconv.conv(X, W, algorithm="winograd_f8x8")


def lax_conv(x, w, stride=1):
    return lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=NHWC)


def test_a_program_whose_layers_it_takes_in_part(native_cpu):
    """Under ``override`` a layer that Winograd refuses gets the usual kernel; explain says why."""
    x, w = draw((2, 8, 8, 4), (3, 3, 4, 4))

    def loss(x, w):
        return jnp.sum(lax_conv(lax_conv(x, w), w, stride=2) ** 2)

    step = jax.grad(loss, (0, 1))
    plain = jax.jit(step)(x, w)
    with jaxconv.override(algorithm="winograd"):
        found = jaxconv.explain(step, x, w)
        for ours, theirs in zip(jax.jit(step)(x, w), plain, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-2)
    strided = [c for c in found.convolutions if "4,4,4]" in c.operands[0] + c.result]
    assert [c.op for c in found.convolutions].count("wgrad") == 2
    for c in found.convolutions:
        if c.op == "wgrad":
            assert c.instance == "wgrad_onednn_f32" and c.declined == ()
        elif c in strided:
            assert c.instance == f"{c.op}_onednn_f32"
            assert c.declined == (("winograd", "stride 2x2; Winograd takes 1x1"),)
        else:
            assert c.instance == f"{c.op}_winograd_f32_4x4_jax" and c.declined == ()
    text = str(found)
    assert "(rms error about 2.3e-06 of std(y))" in text
    assert "not by the algorithm asked for:\n" in text
    assert "winograd: stride 2x2; Winograd takes 1x1" in text


def test_install_and_families_under_override(native_cpu):
    x, w = draw((2, 8, 8, 4), (3, 3, 4, 4))

    def instances(**options):
        with jaxconv.override(**options):
            return [c.instance for c in jaxconv.explain(lax_conv, x, w).convolutions]

    jaxconv.install(algorithm={"fprop": "winograd_f2x2"})
    try:
        (c,) = jaxconv.explain(lax_conv, x, w).convolutions
        assert c.instance == "fprop_winograd_f32_2x2_jax"
        assert instances(algorithm="onednn") == ["fprop_onednn_f32"]
        assert instances(algorithm="im2col") == ["fprop_im2col"]
        assert instances(algorithm="xla") == [None]
        with pytest.raises(ValueError, match="'igemm_none' is not in this build"):
            instances(algorithm="igemm_none")
    finally:
        jaxconv.uninstall()
    with jax.enable_x64(True), jaxconv.override(algorithm="onednn"):
        (c,) = jaxconv.explain(lax_conv, x.astype(np.float64), w.astype(np.float64)).convolutions
        assert c.instance is None and "float64" in c.declined[0].reason


# --- training -------------------------------------------------------------------------------------


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("f16", marks=pytest.mark.slow)])
def test_a_network_trained_with_it_is_as_accurate(dtype):
    """On digits: three 3x3 layers, with F(4x4) in both directions, and with direct kernels."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    labels, cut = digits.target.astype(np.int32), 1200

    def logits(params, x):
        for i, w in enumerate(params["conv"]):
            x = jax.nn.relu(lax_conv(x.astype(DTYPES[dtype]), w.astype(DTYPES[dtype])))
            if i != 1:
                n, h, _, c = x.shape
                x = x.reshape(n, h // 2, 2, h // 2, 2, c).max((2, 4))
        return x.reshape(x.shape[0], -1).astype(jnp.float32) @ params["dense"]

    def loss(params, x, labels):
        # The scaled loss keeps gradients normal in float16; Adam's steps do not change.
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), labels).sum()

    optimizer = optax.adam(8e-3)

    @jax.jit
    def step(params, state, x, labels):
        updates, state = optimizer.update(jax.grad(loss)(params, x, labels), state)
        return optax.apply_updates(params, updates), state

    def accuracy(algorithm) -> float:
        rng = np.random.default_rng(0)
        widths = (1, 16, 32, 32)
        params = {
            "conv": [
                (rng.standard_normal((3, 3, c, k)) * (2 / (9 * c)) ** 0.5).astype(np.float32)
                for c, k in itertools.pairwise(widths)
            ],
            "dense": (rng.standard_normal((128, 10)) * 0.1).astype(np.float32),
        }
        state = optimizer.init(params)
        with jaxconv.override(algorithm=algorithm):
            taken = jaxconv.explain(step, params, state, images[:64], labels[:64])
            by_winograd = [c.count for c in taken if f"_winograd_{dtype}_4x4" in str(c.instance)]
            assert sum(by_winograd) == (5 if algorithm != "auto" else 0), taken
            for _ in range(5):
                order = rng.permutation(cut)[: cut // 64 * 64].reshape(-1, 64)
                for chosen in order:
                    params, state = step(params, state, images[chosen], labels[chosen])
            answers = jnp.argmax(jax.jit(logits)(params, images[cut:]), axis=-1)
        return float(np.mean(answers == labels[cut:]))

    direct, winograd = accuracy("auto"), accuracy("winograd_f4x4")
    assert direct > 0.9 and winograd > direct - 0.02, (direct, winograd)
