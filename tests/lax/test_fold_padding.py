"""Explicit zero padding becomes part of convolutions, under ``override`` and in ``fuse``."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import assert_exact, on_cpu

import jaxconv

NHWC = ("NHWC", "HWIO", "NHWC")
X, W = (2, 8, 9, 4), (3, 3, 4, 4)


def integers(seed: int, *shapes, dtype=np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-2, 3, shape).astype(dtype) for shape in shapes]


def pad(x, *sides, value=0.0):
    """``lax.pad`` on all axes but the first."""
    config = [(0, 0, 0), *((*pair, 0) for pair in sides)]
    config += [(0, 0, 0)] * (x.ndim - len(config))
    return lax.pad(x, np.array(value, x.dtype), config)


def valid(x, w, stride=1, padding="VALID", numbers=NHWC, **options):
    strides = (stride,) * (x.ndim - 2)
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **options)


def overridden(f):
    def call(*arguments):
        with jaxconv.override():
            return f(*arguments)

    return call


WAYS = {"override": overridden, "fuse": jaxconv.fuse}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


def pads(f, *arguments) -> int:
    """The number of pads and crops in the lowered program, except those that change nothing."""
    text = jax.jit(lambda *arguments: f(*arguments)).lower(*arguments).as_text()
    found = re.findall(r"stablehlo.pad .*low = \[(.*?)\], high = \[(.*?)\]", text)
    return sum(any(int(n) for n in f"{lo}, {hi}".split(", ")) for lo, hi in found)


def check(found, f, *arguments, left: int = 0) -> None:
    """The program ``found`` has ``left`` pads, and the results of ``f`` in lax."""
    count = pads(found, *arguments)
    assert count == left
    expected, actual = on_cpu(f, *arguments), jax.jit(lambda *a: found(*a))(*arguments)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_exact(a, b, "")


def with_gradients(f):
    """A function's result, and the gradients of both operands."""

    def call(x, w):
        y, vjp = jax.vjp(f, x, w)
        return y, *vjp(jnp.sign(y))

    return call


# --- what is folded ---

BOTH = ((1, 1), (1, 1))


def two_readers(x, w):
    padded = pad(x, *BOTH)
    return valid(padded, w) + 2 * valid(padded, w)


def in_bfloat16(x, w):
    return valid(pad(x, *BOTH).astype(jnp.bfloat16), w.astype(jnp.bfloat16))


def channels_first(x, w):
    padded = jnp.transpose(pad(x, *BOTH), (0, 3, 1, 2))
    return valid(padded, w, numbers=("NCHW", "HWIO", "NHWC"))


def in_a_branch(x, w):
    def padded(x, w):
        return valid(pad(x, *BOTH), w)

    return lax.cond(x[0, 0, 0, 0] > 9, lambda x, w: x, padded, x, w)


FOLDED = {
    "Keras's ZeroPadding2D": lambda x, w: valid(jnp.pad(x, ((0, 0), *BOTH, (0, 0))), w),
    "Keras's correct_pad": lambda x, w: valid(pad(x, (0, 1), (1, 1)), w, 2),
    "one axis": lambda x, w: valid(pad(x, (2, 0)), w),
    "dilated": lambda x, w: valid(pad(x, (4, 0), (2, 3)), w, rhs_dilation=(2, 2)),
    "beside padding": lambda x, w: valid(pad(x, (1, 0), (0, 2)), w, padding=((1, 2), (2, 0))),
    "beside a crop": lambda x, w: valid(pad(x, (2, 1), (1, 0)), w, padding=((-1, -1), (-1, 1))),
    "of a dilated x": lambda x, w: valid(
        pad(x, (1, 0), (1, 1)), w, padding=((0, 0), (0, 1)), lhs_dilation=(2, 1)
    ),
    "a pad of a pad": lambda x, w: valid(pad(pad(x, (1, 0)), (0, 1), (1, 0)), w),
    "minus zero": lambda x, w: valid(pad(x, *BOTH, value=-0.0), w),
    "two readers": two_readers,
    "channels first": channels_first,
    "in bfloat16": in_bfloat16,
    "feature groups": lambda x, w: valid(
        pad(x, *BOTH), jnp.sum(w, axis=2, keepdims=True), feature_group_count=4
    ),
    "batch groups": lambda x, w: valid(pad(x, *BOTH), w, batch_group_count=2),
    "this library's": lambda x, w: jaxconv.conv(pad(x, *BOTH), w, padding="VALID"),
    "this library's, strided": lambda x, w: jaxconv.conv(
        pad(x, (2, 1), (0, 3)), w, stride=2, dilation=2, padding=((1, 0), (0, 0))
    ),
    "with an epilogue": lambda x, w: jaxconv.conv(
        pad(x, *BOTH), w, padding="VALID", bias=jnp.arange(4.0), activation="relu"
    ),
    "in a loop": lambda x, w: lax.scan(lambda y, _: (valid(pad(y, *BOTH), w), 0), x, None, 2)[0],
    "in remat": jax.checkpoint(lambda x, w: valid(pad(x, *BOTH), w)),
    "in a branch": in_a_branch,
    "in a function": lambda x, w: jax.jit(lambda x, w: valid(pad(x, *BOTH), w))(x, w),
}


# Programs whose gradient passes the padded array from one function to another.
BETWEEN_FUNCTIONS = ("in a loop", "in a branch", "in a function")


def seen_by(way) -> list[str]:
    """The programs that a way rewrites: ``fuse`` skips those without a convolution to fuse."""
    return [name for name in FOLDED if way != "fuse" or name != "with an epilogue"]


@pytest.mark.parametrize(("way", "name"), [(way, n) for way in WAYS for n in seen_by(way)])
def test_a_pad_is_the_convolution_s(way, name):
    check(WAYS[way](FOLDED[name]), FOLDED[name], *integers(1, X, W))


@pytest.mark.parametrize(("way", "name"), [(way, n) for way in WAYS for n in seen_by(way)])
def test_so_is_the_crop_of_its_gradient(way, name):
    """The data gradient computes only the part of x, and the weight gradient reads x."""
    f = with_gradients(FOLDED[name])
    left = int(name in BETWEEN_FUNCTIONS and way != "fuse")  # fuse folds before differentiating
    check(WAYS[way](f), f, *integers(2, X, W), left=left)


@pytest.mark.parametrize("name", seen_by("fuse"))
def test_gradients_of_a_fused_function(name):
    f = FOLDED[name]
    check(with_gradients(jaxconv.fuse(f)), with_gradients(f), *integers(3, X, W))


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0), (3, None)])
@pytest.mark.parametrize("gradients", [False, True])
def test_under_vmap(way, mapped, gradients):
    """vmap merges its axis with others, between the pad and the convolution."""
    x, w = integers(4, X, W)
    x, w = (
        a if at is None else np.stack([a, a + 1], at) for a, at in zip((x, w), mapped, strict=True)
    )
    f = FOLDED["Keras's ZeroPadding2D"]
    f = jax.vmap(with_gradients(f) if gradients else f, mapped)
    check(way(f), f, x, w)


def test_vmap_of_a_fused_function():
    x, w = integers(5, (3, *X), W)
    f = FOLDED["Keras's ZeroPadding2D"]
    check(jax.vmap(jaxconv.fuse(f), (0, None)), jax.vmap(f, (0, None)), x, w)


@pytest.mark.parametrize("rank", [1, 3])
def test_one_and_three_axes(way, rank):
    numbers = {1: ("NWC", "WIO", "NWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}[rank]
    x, w = integers(6, (2, *(5, 6, 4)[:rank], 3), (*(3, 2, 3)[:rank], 3, 4))

    def f(x, w):
        return valid(pad(x, *((2, 0), (0, 1), (1, 1))[:rank]), w, numbers=numbers)

    check(way(f), f, x, w)
    check(way(with_gradients(f)), with_gradients(f), x, w)


def test_int8(way):
    x, w = integers(7, X, W, dtype=np.int8)

    def f(x, w):
        return valid(pad(x, *BOTH), w, preferred_element_type=np.int32)

    check(way(f), f, x, w)


def test_nan_and_inf_reach_the_same_results(way):
    x, w = integers(8, X, W)
    x[0, 0, 0, 0], x[1, 7, 8, 3], x[1, 3, 0, 2] = np.nan, np.inf, -np.inf
    f = FOLDED["one axis"]
    check(way(f), f, x, w)


def test_an_array_captured_as_the_padding():
    x, w = integers(9, X, W)
    zero = jnp.zeros((), np.float32)

    def f(x, w):
        return valid(lax.pad(x, zero, [(0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0)]), w)

    check(jaxconv.fuse(f), f, x, w)


def test_the_problem_of_the_kernel(native_cpu):
    x, w = integers(10, X, W)
    f = FOLDED["Keras's correct_pad"]
    with jax.default_device(jax.devices("cpu")[0]), jaxconv.override():
        rows = jaxconv.explain(with_gradients(f), x, w)
    assert sorted(row.op for row in rows) == ["dgrad", "fprop", "wgrad"]
    for row in rows:
        assert " i8x9 " in row.problem and row.problem.endswith(" p0_1x1_1"), row.problem


def test_devices_of_a_mesh(mesh):
    """18 padded rows cannot be split evenly over eight devices; the 16 rows of x can."""
    from jax.sharding import NamedSharding, PartitionSpec

    x, w = integers(11, (2, 16, 9, 4), W)
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "data")))
    f = FOLDED["Keras's ZeroPadding2D"]
    check(overridden(with_gradients(f)), with_gradients(f), x, w)


def test_shard_map(way, mesh):
    from jax.sharding import PartitionSpec

    x, w = integers(12, (8, *X[1:]), W)
    specs = PartitionSpec("data"), PartitionSpec()
    f = FOLDED["Keras's ZeroPadding2D"]
    f = jax.shard_map(with_gradients(f), mesh=mesh, in_specs=specs, out_specs=(specs[0], *specs))
    check(way(f), f, x, w)


def test_flax_s_causal_padding(way):
    nn = pytest.importorskip("flax.linen")
    model = nn.Sequential([nn.Conv(4, (3,), padding="CAUSAL", kernel_dilation=(2,)), nn.relu])
    x = np.random.default_rng(0).standard_normal((2, 9, 4)).astype(np.float32)
    variables = model.init(jax.random.key(0), x)
    found = way(model.apply)
    assert pads(model.apply, variables, x) == 1 and pads(found, variables, x) == 0
    actual, expected = jax.jit(lambda *a: found(*a))(variables, x), model.apply(variables, x)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


# --- what is not ---


def mean_too(x, w):
    padded = pad(x, *BOTH)
    return valid(padded, w), jnp.max(padded)


def filter_too(x, w):
    padded = pad(x[:, :1, :1], *BOTH)
    return valid(padded, padded, numbers=("NHWC", "OHWI", "NHWC"))


def padded_too(x, w):
    padded = pad(x, *BOTH)
    return valid(padded, w), padded


def of_two_one_dilated(x, w):
    padded = pad(x, (0, 0), (3, 3))
    return valid(padded, w), valid(padded, w, rhs_dilation=(1, 2))


def two_uses_of_what_is_cropped(x, w):
    y = valid(x, w, padding=BOTH)
    return lax.pad(y, np.float32(0), [(0, 0, 0), (-1, -1, 0), (0, 0, 0), (0, 0, 0)]), y


def interior(x, w):
    return valid(lax.pad(x, np.float32(0), [(0, 0, 0), (1, 1, 1), (0, 0, 0), (0, 0, 0)]), w)


def a_named_kernel(x, w):
    return jaxconv.conv(pad(x, *BOTH), w, padding="VALID", algorithm="im2col")


LEFT = {
    "another reader": mean_too,
    "the filter's reader": filter_too,
    "a result": padded_too,
    "a reader with too small a window": of_two_one_dilated,
    "a window that does not reach": lambda x, w: valid(pad(x, (3, 0), (1, 1)), w),
    "another value": lambda x, w: valid(pad(x, *BOTH, value=1.0), w),
    "infinity": lambda x, w: valid(pad(x, *BOTH, value=-np.inf), w),
    "a value of the program": lambda x, w: valid(
        lax.pad(x, w[0, 0, 0, 0], [(0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0)]), w
    ),
    "channels": lambda x, w: valid(pad(x[..., :3], *BOTH, (0, 1)), w),
    "images": lambda x, w: valid(jnp.pad(x, ((0, 1), *BOTH, (0, 0))), w),
    "interior": interior,
    "a shift": lambda x, w: valid(pad(x, (1, -1), (1, 1)), w),
    "a crop by hand": lambda x, w: valid(pad(x, (-1, 0), (0, -1)), w),
    "an activation between": lambda x, w: valid(jnp.square(pad(x, *BOTH)) + 1, w),
    "a crop that is used whole": two_uses_of_what_is_cropped,
    "a crop of more than the padding": lambda x, w: pad(valid(x, w, padding=BOTH), (-2, 0)),
    "an algorithm that is named": a_named_kernel,
}


@pytest.mark.parametrize("name", LEFT)
def test_a_pad_that_stays(way, name):
    check(way(LEFT[name]), LEFT[name], *integers(13, X, W), left=1)


def test_nothing_is_folded_where_nothing_is_asked_for():
    """Without ``install`` the program is lax's own, even after the rules were registered."""
    x, w = integers(14, X, W)
    f = with_gradients(FOLDED["Keras's ZeroPadding2D"])
    before = jax.jit(lambda *a: f(*a)).lower(x, w).as_text()
    with jaxconv.override():
        pass
    assert jax.jit(lambda *a: f(*a)).lower(x, w).as_text() == before
    assert pads(f, x, w) == 2

    def partly(x, w):
        with jaxconv.override():
            y = f(x, w)[0]
        with jaxconv.override(False):
            return y, f(x, w)[0]

    assert pads(overridden(partly), x, w) == 1


def test_install_folds_too():
    x, w = integers(15, X, W)
    f = with_gradients(FOLDED["Keras's ZeroPadding2D"])
    with jaxconv.install():
        check(f, f, x, w)
        check(jaxconv.fuse(f), f, x, w)
    assert pads(f, x, w) == 2


def random_program(rng):
    """A random pad and convolution, the same without ``padding``, and operands."""
    window, dilation, lhs_dilation = rng.integers((1, 1, 1), (4, 3, 3), (2, 3)).T
    x, w = integers(int(rng.integers(1000)), (2, 7, 6, 2), (*window, 2, 2))
    least = -(rng.random() < 0.1)
    sides = [tuple(map(int, rng.integers(least, n + 1, 2))) for n in (window - 1) * dilation]
    padding = [tuple(map(int, pair)) for pair in rng.integers(-1, 2, (2, 2))]
    strides = rng.integers(1, 3, 2)

    def f(x, w):
        rest = (lhs_dilation, dilation, NHWC)
        return lax.conv_general_dilated(pad(x, *sides), w, strides, padding, *rest)

    def by_hand(x, w):  # XLA:CPU is wrong if a strided convolution crops
        inner = [(lo, hi, step - 1) for (lo, hi), step in zip(padding, lhs_dilation, strict=True)]
        x = lax.pad(pad(x, *sides), np.float32(0), [(0, 0, 0), *inner, (0, 0, 0)])
        return lax.conv_general_dilated(x, w, strides, "VALID", None, dilation, NHWC)

    return f, by_hand, x, w


@pytest.mark.parametrize("seed", [1, 2])
def test_random_programs(way, seed):
    """Whatever is folded, the results stay the same."""
    rng = np.random.default_rng(seed)
    folded = 0
    for _ in range(10):
        f, by_hand, x, w = random_program(rng)
        both = with_gradients(f)
        if any(0 in a.shape for a in jax.eval_shape(both, x, w)):
            continue
        found, expected = overridden(way(both)), on_cpu(with_gradients(by_hand), x, w)
        folded += pads(found, x, w) < pads(both, x, w)
        actual = jax.jit(lambda x, w, found=found: found(x, w))(x, w)
        for a, b in zip(actual, expected, strict=True):
            assert_exact(a, b, f"{x.shape} {w.shape}")
    assert folded > 1
