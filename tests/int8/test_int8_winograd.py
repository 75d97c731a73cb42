"""``jaxconv.int8.conv`` by Winograd: exact if nothing is rounded, otherwise the stated error.

On a GPU every instance of the family ``winograd_int8`` is compared with the implementation in JAX.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import winograd_variants
from cc_programs import CC
from int8_reference import operands, requantized, sparse, sums, terms
from kernel_tables import instances
from numerics import into_poison
from problems import problem
from winograd_errors import int8_operands

import jaxconv
from jaxconv import int8
from jaxconv._src.int8 import int8_primitive, int8_winograd
from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op
from jaxconv._src.ways import winograd_jax
from jaxconv.bench import int8_layers
from jaxconv.bench.layers import LAYERS
from jaxconv.bench.problem import Problem

KERNELS = [each for each in instances() if each.family == "winograd_int8"]
TILES = list(int8_winograd.ALGORITHMS)
PROBLEMS = [
    problem("tails", (9, 7), 3, n=2, c=64, k=40, padding=1),
    problem("cropped", (13, 18), 3, n=1, c=33, k=64, padding=((2, -1), (1, 3))),
    problem("one_row_of_tiles", (3, 25), 3, n=1, c=32, k=32, padding=((0, 2), (5, 1))),
]
# Channels in multiples of 32; also many CTAs, and rows longer than a CTA of the 4x4 tile takes.
ON_A_GPU = [
    problem("tails", (9, 7), 3, n=2, c=64, k=96, padding=1),
    problem("cropped", (13, 18), 3, n=1, c=32, k=64, padding=((2, -1), (1, 3))),
    problem("many_tiles", (45, 50), 3, n=3, c=96, k=160, padding=1),
    problem("long_rows", (9, 13), 3, n=1, c=1344, k=96, padding=1),
]


def sparse_operands(p) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    return tuple(sparse(rng, p.canonical_shape(role)) for role in "xw")


def deviation(actual, exact: np.ndarray) -> float:
    """The root mean square error over the standard deviation of the exact result."""
    difference = np.asarray(actual, np.float64) - exact
    return float(np.sqrt(np.mean(difference**2)) / np.std(exact.astype(np.float64)))


# --- the matrices ---


@pytest.mark.parametrize("m", [2, 4])
def test_the_matrices_convolve_and_have_units(m):
    made, alpha = int8_winograd.integer_matrices(m), m + 2

    def of(matrix, vector):
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    for i in range(alpha):
        for j in range(3):
            d, g = ([Fraction(at == k) for k in range(n)] for at, n in ((i, alpha), (j, 3)))
            y = of(made.at, [u * v for u, v in zip(of(made.g, g), of(made.bt, d), strict=True)])
            assert y == [sum(d[p + r] * g[r] for r in range(3)) for p in range(m)]
    for rows, units in ((made.bt, made.input_unit), (made.g, made.filter_unit)):
        for row, unit in zip(rows, units, strict=True):
            assert Fraction(1, 2) < sum(map(abs, row)) <= 1
            multiples = [factor / unit for factor in row]
            assert all(x.denominator == 1 for x in multiples)
            assert unit == 1 or any(x.numerator % 2 for x in multiples)


def test_the_matrices_are_the_library_s(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "matrices.cc").write_text(
        """
        #include <cstdio>
        #include "cuda/winograd_int8/matrices.h"
        template <int m> void Print() {
          constexpr const auto& of = jaxconv::winograd_int8::kMatrices<m>;
          for (auto& row : of.bt) for (float x : row) std::printf("%a ", x);
          for (auto& row : of.g) for (float x : row) std::printf("%a ", x);
          for (auto& row : of.at) for (float x : row) std::printf("%a ", x);
          for (float x : of.input_unit) std::printf("%a ", x);
          for (float x : of.filter_unit) std::printf("%a ", x);
        }
        int main() { Print<2>(); Print<4>(); }
        """
    )
    program = tmp_path / "matrices"
    command = [compiler, "-std=c++17", f"-I{CC}", str(program) + ".cc", "-o", str(program)]
    subprocess.run(command, check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    expected = []
    for m in (2, 4):
        bt, g, at, *units = int8_winograd.integer_matrices(m)
        expected += [x for matrix in (bt, g, at) for row in matrix for x in row]
        expected += [x for of_rows in units for x in of_rows]
    found = [float.fromhex(x) for x in printed.split()]
    assert found == [float(np.float32(float(x))) for x in expected]


# --- the form in JAX ---


@pytest.mark.parametrize("algorithm", TILES)
@pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: p.name)
def test_small_operands_are_exact(p, algorithm):
    x, w = sparse_operands(p)
    given = terms(p, np.dtype(np.int8))
    acc = sums(p, x, w)
    y = int8.conv(
        x,
        w,
        given["scale"],
        given["bias"],
        given["residual"],
        residual_scale=given["residual_scale"],
        padding=p.padding,
        activation="relu",
        algorithm=algorithm,
    )
    np.testing.assert_array_equal(
        y, requantized(acc, np.dtype(np.int8), activation="relu", **given)
    )
    plain = int8.conv(x, w, padding=p.padding, out_dtype=jnp.int32, algorithm=algorithm)
    np.testing.assert_array_equal(plain, acc)
    assert np.ptp(acc) > 4


@pytest.mark.parametrize("algorithm", TILES)
def test_the_error_is_as_stated(algorithm):
    x, w, exact = int8_operands(256)
    y = int8.conv(x, w, out_dtype=jnp.int32, algorithm=algorithm)
    stated = winograd_jax.rms_error(
        f"fprop_winograd_int8_s8_{algorithm[-3:]}_jax", "cpu", "default"
    )
    assert stated is not None
    assert stated / 1.5 < deviation(y, exact) < stated


@pytest.mark.parametrize("algorithm", TILES)
def test_an_image_is_computed_by_itself(algorithm):
    """A result depends neither on other images of the batch nor on other output channels."""
    p = PROBLEMS[0]
    x, w = operands(p, np.dtype(np.int8))

    def conv(x, w):
        return int8.conv(x, w, out_dtype=jnp.int32, algorithm=algorithm)

    y = conv(x, w)
    np.testing.assert_array_equal(conv(x[1:], w[..., 8:24]), y[1:, ..., 8:24])
    np.testing.assert_array_equal(jax.vmap(conv, (0, None))(x[:, None], w), y[:, None])
    packed = int8.conv(
        int8.pack(x), int8.pack_filter(w), 1.0, out_dtype=jnp.float32, algorithm=algorithm
    )
    np.testing.assert_array_equal(int8.unpack(packed), y)
    assert deviation(y, sums(p, x, w)) < 0.08


def test_explain_states_the_error():
    x, w = operands(PROBLEMS[0], np.dtype(np.int8))
    explanation = jaxconv.explain(
        lambda x, w: int8.conv(x, w, 1.0, algorithm="winograd_f4x4"), x, w
    )
    (used,) = explanation.convolutions
    assert used.instance.startswith("fprop_winograd_int8_s8_4x4_")
    assert used.rms_error == 6.7e-2 and "(rms error about 6.7e-02 of std(y))" in str(explanation)


def test_bench_has_rows_for_the_tiles():
    layer = Problem("seed_224", LAYERS["seed_224"], Op.FPROP, "int8_nchw32", algorithm="native")
    direct, *tiles = winograd_variants.of(layer, "cpu")
    assert direct == layer and [each.algorithm for each in tiles] == TILES
    assert [each.bound for each in tiles] == [2.8e-2, 0.134]
    names = [int8_layers.selection(each, "cpu").instance for each in tiles]
    assert names == ["fprop_winograd_int8_s8_2x2_jax", "fprop_winograd_int8_s8_4x4_jax"]


X, W = np.zeros((1, 6, 6, 64), np.int8), np.zeros((3, 3, 64, 32), np.int8)
REFUSED = {
    "another tile": (
        X,
        W,
        dict(algorithm="winograd_f6x6"),
        "tiles winograd_f2x2 and winograd_f4x4",
    ),
    "no tile": (X, W, dict(algorithm="winograd"), "tiles winograd_f2x2 and winograd_f4x4"),
    "a stride": (X, W, dict(stride=2), "stride 2x2; Winograd takes 1x1"),
    "a window": (X, W[:1, :1], {}, "filter 1x1; Winograd takes 3x3"),
    "a dilation": (X, W, dict(dilation=2), "dilation 2x2; Winograd takes 1x1"),
    "uint8": (X.astype(np.uint8), W, {}, "images of uint8; Winograd takes int8"),
    "groups": (
        X,
        np.zeros((3, 3, 32, 64), np.int8),
        {},
        "2 groups; Winograd of int8 operands takes one",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refusals_have_reasons(case):
    x, w, arguments, message = case
    with pytest.raises(ValueError, match=message):
        int8.conv(x, w, 1.0, **{"algorithm": "winograd_f4x4", **arguments})


def test_only_int8_conv_takes_it():
    with pytest.raises(ValueError, match="Winograd takes float16"):
        jaxconv.conv(X, W, algorithm="winograd_f4x4")


# --- the kernels ---


def select(name: str, p):
    spec = int8_primitive.Int8Spec(
        conv=p.spec(algorithm=name), layout="nhwc", out_dtype=np.dtype(np.int32)
    )
    sizes = spec.sizes(p.canonical_shape("x"), (p.k, 0))
    return spec, int8_primitive.Quantised(spec).select("cuda", sizes, np.dtype(np.int8))[0]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda each: each.name)
def test_a_kernel_is_the_form_in_jax(kernel):
    """Bit for bit on small operands; otherwise up to contractions that compilers may do."""
    tile = kernel.variant[:3]
    for p in ON_A_GPU:
        spec, chosen = select(kernel.name, p)
        assert chosen.instance == kernel.name, chosen.refusals
        in_jax = dataclasses.replace(p.spec(), algorithm=(f"winograd_f{tile}",) * len(Op))
        for x, w in (sparse_operands(p), operands(p, np.dtype(np.int8))):
            rows = jnp.moveaxis(w, -1, 0).reshape(p.k, -1)
            y = np.asarray(into_poison(lambda x, w, s=spec: int8_primitive.bind(s, x, w), x, rows))
            again = np.asarray(int8_primitive.bind(spec, x, rows))
            np.testing.assert_array_equal(y, again)
            exact = sums(p, x, w)
            if np.abs(x).max() == 1:
                np.testing.assert_array_equal(y, exact, err_msg=f"{kernel.name} {p.name}")
            else:
                form = int8_winograd.sums(
                    jnp.asarray(x), jnp.asarray(w), in_jax, f"winograd_f{tile}"
                )
                assert deviation(y, np.asarray(form)) < 5e-3
                assert deviation(y, exact) < 0.08


@pytest.mark.gpu
def test_the_gpu_takes_the_kernel_by_the_name_of_its_tile():
    p = ON_A_GPU[0]
    for algorithm in TILES:
        assert select(algorithm, p)[1].instance in {kernel.name for kernel in KERNELS}
    assert "_winograd_" not in str(select("native", p)[1].instance)
    assert not isinstance(native.load("cuda"), native.Refusal)
