"""Filters prepared for Winograd give the same numbers; their layout is that of the kernels."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import subprocess

import cpu_features
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cc_programs import CC
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec
from numerics import error

import jaxconv
from jaxconv import winograd
from jaxconv._src.conv import bilinear
from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op
from jaxconv._src.winograd import winograd_filter
from jaxconv.bench.layers import Layer
from jaxconv.bench.problem import DTYPES

NHWC = ("NHWC", "HWIO", "NHWC")


def draw(*shapes, dtype=np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


# --- the same numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("tile", winograd_filter.LAYOUTS)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_the_result_is_that_of_the_filter(platform, tile, dtype):
    groups = 2 if (dtype == "f16") == (tile in ("f2x2", "f4x3")) else 1
    x, w = draw((2, 9, 7, 8 * groups), (3, 3, 8, 24), dtype=DTYPES[dtype])
    options = dict(groups=groups, padding=((1, 0), (2, 1)), preferred_element_type=np.float32)
    exact = jaxconv.conv(x.astype("f"), w.astype("f"), **options, precision="highest")
    exact = np.asarray(exact, np.float64)
    prepared = winograd.prepare(w, tile, groups=groups)
    assert (prepared.shape, prepared.dtype, prepared.tile) == (w.shape, w.dtype, tile)
    conv = jax.jit(functools.partial(jaxconv.conv, **options))
    direct = jax.jit(functools.partial(jaxconv.conv, algorithm=f"winograd_{tile}", **options))
    ours, theirs = error(conv(x, prepared), exact), error(direct(x, w), exact)
    assert ours < 1.3 * theirs, (ours, theirs)
    (c,) = jaxconv.explain(conv, x, prepared).convolutions
    assert c.instance.startswith(f"fprop_winograd_{dtype}_{tile[1:]}") and c.rms_error
    if platform == "cpu":
        assert c.instance.endswith("_jax")


def test_a_prepared_filter_is_an_argument_of_programs():
    x, w = draw((2, 6, 6, 4), (3, 3, 4, 8), dtype=np.float16)
    prepare = functools.partial(winograd.prepare, tile="f4x4")
    prepared = jax.jit(prepare)(w)
    assert isinstance(prepared, winograd.PreparedFilter)
    leaves, tree = jax.tree.flatten({"layer": prepared})
    assert len(leaves) == 1 and jax.tree.unflatten(tree, leaves)["layer"].tile == "f4x4"
    y = jax.jit(lambda x, p: jaxconv.conv(x, p["layer"], algorithm="winograd"))(
        x, {"layer": prepared}
    )
    np.testing.assert_array_equal(y, jaxconv.conv(x, prepared))
    text = jax.jit(jaxconv.conv).lower(x, prepared).as_text()
    # The program does not transform the filter: it has only 36 rows of V, and the products.
    assert "tensor<3x3x4x8xf16>" not in text
    abstract = jax.eval_shape(prepare, jax.ShapeDtypeStruct(w.shape, w.dtype))
    assert abstract.data.shape == prepared.data.shape and abstract.channels == 4


def test_channels_first_and_other_filter_formats():
    x, w = draw((2, 6, 5, 4), (3, 3, 2, 8))
    y = jaxconv.conv(x, winograd.prepare(w, "f2x2", groups=2), groups=2)
    first = winograd.prepare(np.transpose(w, (3, 2, 0, 1)), "f2x2", groups=2, filter_format="OIHW")
    assert first.shape == w.shape
    x_first = np.transpose(x, (0, 3, 1, 2))
    y_first = jaxconv.conv(x_first, first, groups=2, data_format="NCHW")
    np.testing.assert_allclose(np.transpose(y_first, (0, 2, 3, 1)), y, atol=1e-5)
    np.testing.assert_allclose(jaxconv.conv(x[0], first, groups=2), y[0], atol=1e-5)


def test_vmap_over_either_operand_and_both():
    x, w = draw((3, 2, 6, 5, 4), (3, 3, 3, 4, 6))
    prepared = jax.vmap(functools.partial(winograd.prepare, tile="f4x4"))(w)
    for axes in ((0, None), (None, 0), (0, 0)):
        a = x if axes[0] == 0 else x[0]
        b = prepared if axes[1] == 0 else winograd.prepare(w[0], "f4x4")
        c = w if axes[1] == 0 else w[0]
        ours = jax.jit(jax.vmap(jaxconv.conv, axes))(a, b)
        np.testing.assert_allclose(ours, jax.vmap(jaxconv.conv, axes)(a, c), atol=1e-4)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_over_eight_devices(kind):
    x, w = draw((8, 6, 6, 4), (3, 3, 4, 8))
    prepared = winograd.prepare(w, "f4x4")
    mesh = jax.make_mesh(
        (8,), ("data",), (getattr(jax.sharding.AxisType, kind),), devices=jax.devices("cpu")
    )
    expected = jax.jit(jaxconv.conv)(x, prepared)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, Spec("data")))
        whole = jax.device_put(prepared, NamedSharding(mesh, Spec()))
        compiled = jax.jit(jaxconv.conv).lower(sharded, whole).compile()
        y = compiled(sharded, whole)
    assert "all-gather" not in compiled.as_text()
    assert y.sharding.spec[0] == "data"
    np.testing.assert_allclose(y, expected, atol=1e-4)


def _with_epilogue(x, prepared, bias, residual):
    return jaxconv.conv(x, prepared, padding=1, bias=bias, residual=residual, activation="relu")


@pytest.mark.parametrize("kind", ["Auto", "Explicit", "Manual"])
def test_positions_and_an_epilogue_over_eight_devices(kind):
    """The bits are those of one device, because a tile's rounding depends only on its own data.

    Without AVX-512 XLA's vectorised loops and their remainders round differently.
    """
    x, w, residual = draw((4, 8, 6, 4), (3, 3, 4, 8), (4, 8, 6, 8))
    bias = np.arange(8, dtype=np.float32) / 8
    prepared = winograd.prepare(w, "f2x2")
    whole = jax.jit(_with_epilogue)(x, prepared, bias, residual)
    manual = kind == "Manual"
    of = Spec("data") if manual else Spec("model", "data")  # rows of a tile are not split: 8 / 4
    mesh = jax.make_mesh(
        (4, 2),
        ("data", "model"),
        (jax.sharding.AxisType.Auto if manual else getattr(jax.sharding.AxisType, kind),) * 2,
        devices=jax.devices("cpu"),
    )
    function = _with_epilogue
    if manual:
        specs = dict(in_specs=(of, Spec(), Spec(), of), out_specs=of)
        function = jax.shard_map(function, mesh=mesh, **specs)
    with jax.set_mesh(mesh):
        x, residual = (jax.device_put(a, NamedSharding(mesh, of)) for a in (x, residual))
        rest = jax.device_put((prepared, bias), NamedSharding(mesh, Spec()))
        compiled = jax.jit(function).lower(x, *rest, residual).compile()
        y = compiled(x, *rest, residual)
    assert ("collective-permute" in compiled.as_text()) == (not manual)
    assert "all-gather" not in compiled.as_text()
    if cpu_features.AVX512:
        np.testing.assert_array_equal(y, whole)
    np.testing.assert_allclose(y, whole, 2e-6, 1e-5)


@pytest.mark.parametrize(
    ("shape", "padding"), [((0, 5, 5, 4), "SAME"), ((2, 2, 2, 4), "VALID"), ((1, 4, 4, 4), -2)]
)
def test_no_elements(shape, padding):
    prepared = winograd.prepare(np.ones((3, 3, 4, 6), np.float16), "f4x4")
    expected = jaxconv.conv(np.ones(shape, "e"), np.ones((3, 3, 4, 6), "e"), padding=padding)
    y = jaxconv.conv(np.ones(shape, np.float16), prepared, padding=padding)
    assert y.shape == expected.shape and not np.any(y)


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e35])
def test_bfloat16_of_any_magnitude(size):
    x, w = draw((1, 6, 6, 8), (3, 3, 8, 8), dtype=jnp.bfloat16)
    w = (w.astype(np.float32).clip(-1, 1) * np.float32(size)).astype(jnp.bfloat16)
    prepared = winograd.prepare(w, "f4x4")
    assert np.isfinite(np.asarray(prepared.data, np.float32)).all()
    exact = np.asarray(jaxconv.conv(x, w, algorithm="xla"), np.float64)
    y = np.asarray(jaxconv.conv(x, prepared), np.float64)
    np.testing.assert_allclose(y, exact, atol=0.03 * np.abs(exact).max())


# --- as the kernels read it -----------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
def test_the_row_order_is_the_library_s(tmp_path, groups):
    """U of "f4x3" has each element where cc/cuda/winograd/row_filter.h puts it."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    k, c = 136, 40
    program = tmp_path / "order.cc"
    program.write_text(
        """
        #include <cstdio>
        #include <cstdlib>
        #include "cuda/winograd/row_filter.h"
        int main(int, char** argv) {
          const int k = std::atoi(argv[1]), c = std::atoi(argv[2]);
          const jaxconv::winograd::RowFilter order(6, k, c);
          std::printf("%lld\\n", static_cast<long long>(order.elements()));
          for (int r = 0; r < 3; ++r) for (int p = 0; p < 6; ++p)
            for (int i = 0; i < k; ++i) for (int j = 0; j < c; ++j)
              std::printf("%lld\\n", static_cast<long long>(order.Offset(r, p, i, j)));
        }
        """
    )
    built = tmp_path / "order"
    subprocess.run([compiler, "-std=c++17", f"-I{CC}", program, "-o", built], check=True)
    printed = subprocess.run([built, str(k), str(c)], capture_output=True, text=True, check=True)
    elements, *offsets = map(int, printed.stdout.split())
    (w,) = draw((3, 3, c, groups * k), dtype=np.float16)
    prepared = winograd.prepare(w, "f4x3", groups=groups)
    assert prepared.data.shape == (128 + groups * elements,)
    u, _ = winograd_filter.unpacked(prepared)
    for group in range(groups):
        stored = np.asarray(prepared.data[128 + group * elements :])[np.asarray(offsets)]
        ours = np.asarray(u[:, :, group * k : (group + 1) * k]).ravel()
        np.testing.assert_array_equal(stored, ours)
    assert np.asarray(prepared.data[:2]).view(np.float32) == 1


# --- refused, with the reason ---------------------------------------------------------------------

X, W = np.zeros((2, 8, 8, 4), np.float32), np.zeros((3, 3, 4, 6), np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((W, "f3x3"), {}, ValueError, "tile: expected one of f2x2, f4x4, f6x6, f4x3, got 'f3x3'"),
        ((W[0], "f2x2"), {}, ValueError, "w: expected 4 dimensions, HWIO"),
        ((W[:2], "f2x2"), {}, ValueError, r"expected a 3x3 filter, HWIO; got shape \(2, 3"),
        ((W[..., :0], "f2x2"), {}, ValueError, "expected a 3x3 filter"),
        ((W.astype(np.int8), "f2x2"), {}, TypeError, "expected one of float16, .*, got int8"),
        ((W, "f2x2"), dict(groups=4), ValueError, "groups: 4 does not divide the 6 output"),
        ((W, "f2x2"), dict(filter_format="HWC"), ValueError, "filter_format: expected H, W, I"),
        ((winograd.prepare(W, "f2x2"), "f2x2"), {}, TypeError, "got a filter prepared for f2x2"),
    ],
)
def test_prepare_refuses(arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        winograd.prepare(*arguments, **options)


@pytest.mark.parametrize(
    ("x", "options", "kind", "message"),
    [
        (X, dict(stride=2), ValueError, "stride 2x2; Winograd takes 1x1"),
        (X, dict(dilation=(1, 2)), ValueError, "dilation 1x2; Winograd takes 1x1"),
        (X, dict(precision="highest"), ValueError, "precision highest: Winograd's error"),
        (X, dict(algorithm="winograd_f2x2"), ValueError, "prepared for 'winograd_f4x4'; expected"),
        (X, dict(algorithm="xla"), ValueError, "prepared for 'winograd_f4x4'; expected that"),
        (X, dict(algorithm="fprop_winograd_f32_9x9"), ValueError, "not in this build|cannot serve"),
        (X, dict(groups=2), ValueError, "groups"),
        (X[..., :3], {}, ValueError, "expected 3 input channels"),
        (X.astype(np.float16), {}, TypeError, "prepared from the dtype of x, float16, got one"),
        (X, dict(data_format="NCHW"), ValueError, "channels"),
        (X[0, 0], {}, ValueError, "x: expected 4 dimensions"),
    ],
)
def test_conv_refuses(x, options, kind, message):
    prepared = winograd.prepare(W, "f4x4")
    with pytest.raises(kind, match=message):
        jaxconv.conv(x, prepared, **options)


def test_groups_are_those_of_the_filter():
    prepared = winograd.prepare(W, "f4x4", groups=2)
    with pytest.raises(ValueError, match="groups: expected 2, for which w was prepared, got 1"):
        jaxconv.conv(X, prepared)


def test_other_entry_points_and_damaged_data_are_refused():
    prepared = winograd.prepare(W, "f4x4")
    with pytest.raises(TypeError, match="rhs: expected an array, got a filter prepared for f4x4"):
        jaxconv.conv_general_dilated(X, prepared, (1, 1), "SAME")
    damaged = dataclasses.replace(prepared, data=prepared.data[:2])
    with pytest.raises(ValueError, match=r"w.data: expected float32\[6, 6, 6, 4\]"):
        jaxconv.conv(X, damaged)


@pytest.mark.parametrize("argument", [0, 1])
def test_it_has_no_derivative(argument):
    prepared = winograd.prepare(W, "f4x4")
    with pytest.raises(TypeError, match=r"prepared filter has no derivative.*stop_gradient"):
        jax.grad(lambda x, p: jaxconv.conv(x, p).sum(), argument)(X, prepared)
    stopped = jax.tree.map(lax.stop_gradient, prepared)
    jax.grad(lambda b: (jaxconv.conv(lax.stop_gradient(X), stopped) * b).sum())(1.0)


# --- where it is faster ---------------------------------------------------------------------------


class Predicting:
    """A GPU's kernels with only predicted times: of the direct kernel, and of Winograd's tiles."""

    def __init__(self, direct: float, **tiles: float):
        self.direct, self.tiles, self.xla = direct, tiles, 0.0

    def select(self, key: str, algorithm: str, target: str) -> native.Selection:
        if algorithm in ("auto", "native"):
            if 0 < self.xla < self.direct:
                return native.Selection(None, microseconds=self.direct, xla_microseconds=self.xla)
            return native.Selection("fprop_direct", microseconds=self.direct)
        prepared = [t for t, word in winograd_filter.LAYOUTS.items() if key.endswith(f" {word}")]
        names = [t for t in self.tiles if algorithm in ("winograd", f"winograd_{t}")]
        names = [t for t in names if not prepared or t in prepared]
        if not names:  # the build has no such kernel
            raise ValueError(algorithm)
        name = min(names, key=self.tiles.__getitem__)
        # A call without the filter's transform takes half the time.
        return native.Selection(
            f"winograd_{name}", microseconds=self.tiles[name] / (1 + len(prepared))
        )


@pytest.fixture
def predicting(monkeypatch):
    platform = Predicting(10.0, f4x4=8.0, f6x6=6.0)
    monkeypatch.setattr(native, "load", lambda name: platform)
    monkeypatch.setenv("JAXCONV_ALGORITHM", "auto")
    monkeypatch.setenv("JAXCONV_TARGET", "sm_90a")
    return platform


def _chosen(op: Op, algorithm: str, epilogue=()) -> str | None:
    spec = Layer(2, (8, 8), 64, 64, (3, 3), (1, 1), (1, 1)).spec(algorithm=algorithm)
    sizes = Layer(2, (8, 8), 64, 64, (3, 3), (1, 1), (1, 1)).sizes
    half = np.dtype(np.float16)
    return bilinear.select_kernel("cuda", op, spec, sizes, half, half, epilogue)[0].instance


def test_auto_takes_winograd_on_request_where_it_is_predicted_faster(predicting):
    assert _chosen(Op.FPROP, "auto") == "fprop_direct"
    assert _chosen(Op.FPROP, "auto+winograd") == "winograd_f6x6"
    assert _chosen(Op.DGRAD, "auto+winograd_f4x4") == "winograd_f4x4"
    assert _chosen(Op.WGRAD, "auto+winograd") == "fprop_direct"
    assert _chosen(Op.FPROP, "auto+winograd", ("bias",)) == "fprop_direct"
    assert _chosen(Op.FPROP, "auto+winograd_f2x3") == "fprop_direct"  # this build has no f2x3
    predicting.direct = 7.0
    assert _chosen(Op.FPROP, "auto+winograd") == "winograd_f6x6"
    assert _chosen(Op.FPROP, "auto+winograd_f4x4") == "fprop_direct"
    predicting.xla = 5.0
    assert _chosen(Op.FPROP, "auto+winograd") is None  # XLA's convolution


def test_fuse_leaves_apart_what_winograd_computes_faster(predicting):
    def layer(x, w, bias):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
        return jax.nn.relu(y.astype(np.float32) + bias).astype(x.dtype)

    operands = draw((2, 8, 8, 64), (3, 3, 64, 64), (64,), dtype=np.float16)

    def fused(algorithm: str) -> bool:
        with jaxconv.override(algorithm=algorithm):
            jaxpr = jax.make_jaxpr(jaxconv.fuse(lambda *a: layer(*a)))(*operands)
        return "jaxconv_fused" in str(jaxpr)

    assert fused("auto") and not fused("auto+winograd")
    predicting.direct = 5.0
    assert fused("auto+winograd") and not fused("winograd")


def test_with_auto_a_platform_without_its_kernels_stays_direct(native_cpu):
    x, w = draw((2, 6, 6, 8), (3, 3, 8, 8))
    (c,) = jaxconv.explain(
        lambda x, w: jaxconv.conv(x, w, algorithm="auto+winograd"), x, w
    ).convolutions
    assert "winograd" not in (c.instance or "")
    np.testing.assert_array_equal(jaxconv.conv(x, w, algorithm="auto+winograd"), jaxconv.conv(x, w))
    with pytest.raises(ValueError, match=r"'auto\+winograd_f3x3' is not in this build"):
        jaxconv.conv(x, w, algorithm="auto+winograd_f3x3")


def test_the_tile_that_is_predicted_faster(predicting):
    x, w = draw((2, 8, 8, 64), (3, 3, 64, 64), dtype=np.float16)
    assert winograd.faster_tile(x, w) == "f6x6"
    assert winograd.faster_tile(x, w, algorithm="winograd_f4x4") == "f4x4"
    channels_first = [jax.ShapeDtypeStruct(s, "float16") for s in ((2, 64, 8, 8), (64, 64, 3, 3))]
    assert winograd.faster_tile(*channels_first, padding=1, data_format="NCHW") == "f6x6"
    predicting.direct = 3.5  # slower than f6x6 with a prepared filter, 3.0
    assert winograd.faster_tile(x, w) == "f6x6"
    assert winograd.faster_tile(x, w, algorithm="winograd_f4x4") is None
    assert winograd.faster_tile(x, w.astype(np.float32)) is None
    assert winograd.faster_tile(*(a.astype(np.float32) for a in (x, w))) is None
    assert winograd.faster_tile(x, w[:1]) is None
    with pytest.raises(ValueError, match=r"expected winograd or one of .* got 'winograd_f2x3'"):
        winograd.faster_tile(x, w, algorithm="winograd_f2x3")
    with pytest.raises(ValueError, match="expected 4 dimensions, NHWC"):
        winograd.faster_tile(x[0], w)


def test_no_tile_is_faster_on_a_cpu(native_cpu, monkeypatch):
    monkeypatch.delenv("JAXCONV_TARGET", raising=False)
    if jax.default_backend() == "gpu":
        pytest.skip("this process has a GPU")
    x, w = draw((2, 8, 8, 64), (3, 3, 64, 64), dtype=np.float16)
    assert winograd.faster_tile(x, w) is None
