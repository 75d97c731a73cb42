"""``int8.conv`` equals its definition bit for bit, on every platform, in both layouts."""

from __future__ import annotations

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from int8_reference import OUT_DTYPES, fma, operands, requantized, sums, terms
from numerics import assert_exact, into_poison
from problems import INT8, INT8_BY_NAME, INT8_DEPTHWISE, Problem, problem

from jaxconv import int8

LAYOUTS = ("NHWC", "NCHW32")
X_DTYPES = {"s8": np.int8, "u8": np.uint8}


def names(problems):
    return [p.name for p in problems]


def layouts(p: Problem) -> tuple[str, ...]:
    return LAYOUTS if p.rank == 2 and p.groups != p.c else LAYOUTS[:1]


def window(p: Problem) -> dict:
    return dict(stride=p.stride, padding=p.padding, dilation=p.dilation)


def convolve(p: Problem, layout: str, x, w, *, residual=None, **options) -> np.ndarray:
    """Runs ``int8.conv`` compiled in ``layout``; takes and returns channels-last arrays."""
    packed = layout == "NCHW32"
    data_format = layout if packed else "channels_last"
    filters = int8.pack_filter(
        w,
        groups=p.groups,
        data_format=data_format,
        filter_format={1: "WIO", 2: "HWIO", 3: "DHWIO"}[p.rank],
    )

    def pack(array):
        # Packs any dtype, as an earlier layer would have written it.
        c = array.shape[-1]
        blocks = int8.pack(jnp.zeros((*array.shape[:-1], c), jnp.int8)).data.shape
        array = jnp.pad(array, [(0, 0)] * 3 + [(0, blocks[1] * 32 - c)])
        array = array.reshape(*array.shape[:3], blocks[1], 32).transpose(0, 3, 1, 2, 4)
        return int8.Packed(array, c)

    def call(x, w, residual):
        if packed and p.c > 4:
            x = pack(x)
        if packed and residual is not None:
            residual = pack(residual)
        y = int8.conv(x, w, residual=residual, data_format=data_format, **window(p), **options)
        assert isinstance(y, int8.Packed) == packed
        return int8.unpack(y) if packed else y

    return np.asarray(into_poison(call, x, filters, residual))


# --- the reference itself -------------------------------------------------------------------------


def rounded(value: Fraction) -> np.float32:
    """The float32 nearest to a number, ties to even."""
    guess = np.float32(float(value))
    near = [np.nextafter(guess, np.float32(s)) for s in (-np.inf, np.inf)]
    return min(
        [guess, *near],
        key=lambda f: (abs(Fraction(float(f)) - value), int(np.float32(f).view(np.int32)) & 1),
    )


def test_the_reference_rounds_a_fused_multiply_add_once():
    rng = np.random.default_rng(0)
    a = rng.integers(-(2**31), 2**31, 4000).astype(np.float32)
    b = (rng.standard_normal(4000) * 10.0 ** rng.integers(-9, 3, 4000)).astype(np.float32)
    cancelling = -a.astype(np.float64) * b * (1 + 10.0 ** -rng.integers(0, 12, 4000))
    for c in (cancelling.astype(np.float32), rng.standard_normal(4000).astype(np.float32)):
        exact = [
            rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
            for x, y, z in zip(a, b, c, strict=True)
        ]
        np.testing.assert_array_equal(fma(a, b, c), np.array(exact, np.float32))
    assert np.any(fma(a, b, cancelling) != a * b + cancelling.astype(np.float32))


def test_the_reference_rounds_once_beside_halves_and_below_the_normal_numbers():
    half = (np.float32(24929), np.float32(673))  # 2^24 + 1
    for rest, expected in ((2.0**-60, 2**24 + 2), (0, 2**24), (-(2.0**-60), 2**24)):
        np.testing.assert_array_equal(fma(*half, rest), [expected])
        np.testing.assert_array_equal(fma(-half[0], half[1], -rest), [-expected])
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(500).astype(np.float32) for _ in range(3))
    a, b = a * np.float32(2.0**-70), b * np.float32(2.0**-70)
    c = (c * 2.0 ** rng.integers(-149, -120, 500)).astype(np.float32)
    exact = [
        rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    np.testing.assert_array_equal(fma(a, b, c), np.array(exact, np.float32))


def test_the_reference_rounds_halves_to_even_and_saturates():
    acc = np.array([[-5, -3, -1, 1, 3, 5, 999, -999]], np.int32)
    for dtype, expected in (
        (np.int8, [-2, -2, 0, 0, 2, 2, 127, -128]),
        (np.uint8, [0, 0, 0, 0, 2, 2, 255, 0]),
    ):
        np.testing.assert_array_equal(requantized(acc, dtype, scale=0.5), [expected])


# --- the sums -------------------------------------------------------------------------------------


@pytest.mark.parametrize("x_dtype", X_DTYPES)
@pytest.mark.parametrize("p", INT8, ids=names(INT8))
def test_sums(platform, p, x_dtype):
    x, w = operands(p, X_DTYPES[x_dtype])
    expected = sums(p, x, w)
    for layout in layouts(p):
        actual = convolve(p, layout, x, w, out_dtype=jnp.int32)
        assert_exact(actual, expected, f"{p.name} {x_dtype} {layout}")


@pytest.mark.parametrize("p", INT8_DEPTHWISE, ids=names(INT8_DEPTHWISE))
def test_depthwise(platform, p):
    """Filters of one channel each; channels are padded to multiples of 32."""
    x, w = operands(p, np.int8)
    acc, given = sums(p, x, w), terms(p, np.int8)
    assert_exact(convolve(p, "NHWC", x, w, out_dtype=jnp.int32), acc, p.name)
    actual = convolve(p, "NHWC", x, w, activation="relu", **given)
    assert_exact(actual, requantized(acc, np.dtype(np.int8), activation="relu", **given), p.name)
    shifted = int8.conv(x, w, out_dtype=jnp.int32, zero_point=3, **window(p))
    assert_exact(shifted, sums(p, x.astype(np.int32) - 3, w), f"{p.name} zero point")


@pytest.mark.parametrize("out", OUT_DTYPES)
def test_without_a_scale_integers_wrap_and_floats_round(platform, out):
    p = INT8_BY_NAME["int8"]
    x, w = operands(p, np.int8)
    expected = requantized(sums(p, x, w), OUT_DTYPES[out])
    for layout in LAYOUTS:
        actual = convolve(p, layout, x, w, out_dtype=OUT_DTYPES[out])
        assert_exact(actual, expected, f"{out} {layout}")


@pytest.mark.parametrize(("x_dtype", "terms"), [("s8", 131_071), ("u8", 65_793)])
def test_the_longest_sums_that_cannot_overflow(platform, x_dtype, terms):
    """The longest sums of extreme products; one more term would exceed 2^31."""
    limits = np.iinfo(X_DTYPES[x_dtype])
    extreme = limits.min or limits.max
    x = np.full((1, 1, terms), extreme, X_DTYPES[x_dtype])
    w = np.full((1, terms, 32), -128, np.int8)
    expected = terms * extreme * -128
    assert abs(expected) < 2**31 <= abs((terms + 1) * extreme * 128)
    y = int8.conv(x, w, out_dtype=jnp.int32, padding="VALID")
    np.testing.assert_array_equal(y, np.full((1, 1, 32), expected, np.int32))


# --- the epilogue ---------------------------------------------------------------------------------


REQUANTIZED = [
    INT8_BY_NAME[name]
    for name in ("int8_blocks", "int8_strided", "int8_groups", "int8_stem", "int8_3d")
]


@pytest.mark.parametrize("out", OUT_DTYPES)
@pytest.mark.parametrize("p", REQUANTIZED, ids=names(REQUANTIZED))
def test_every_term(platform, p, out):
    dtype = OUT_DTYPES[out]
    x_dtype = np.uint8 if out in ("u8", "f32") else np.int8
    x, w = operands(p, x_dtype)
    given = terms(p, dtype)
    acc = sums(p, x, w)
    for activation in (None, "relu", "relu6"):
        expected = requantized(acc, dtype, activation=activation, **given)
        for layout in layouts(p):
            options = dict(given, out_dtype=dtype, activation=activation)
            actual = convolve(p, layout, x, w, **options)
            assert_exact(actual, expected, f"{p.name} {out} {layout} {activation}")


@pytest.mark.parametrize("absent", ["bias", "residual", "both"])
def test_absent_terms(platform, absent):
    p = INT8_BY_NAME["int8"]
    x, w = operands(p, np.int8)
    given = terms(p, np.int8)
    for name in ("bias", "residual") if absent == "both" else (absent,):
        given.pop(name)
    expected = requantized(sums(p, x, w), np.int8, **given)
    for layout in LAYOUTS:
        assert_exact(convolve(p, layout, x, w, **given), expected, f"{absent} {layout}")


@pytest.mark.parametrize("kind", ["scalar", "channel", "image"])
def test_scales(platform, kind):
    p = INT8_BY_NAME["int8_many_images"]
    x, w = operands(p, np.int8)
    scale = terms(p, np.int8, of_image=kind == "image")["scale"]
    if kind == "scalar":
        scale = scale[0]
    assert np.any(scale < 0) or kind == "scalar"
    bias = np.linspace(-40, 40, p.k).astype(np.float32)
    expected = requantized(sums(p, x, w), np.int8, scale=scale, bias=bias)
    assert len(np.unique(expected)) > 200  # of 256
    for layout in LAYOUTS:
        actual = convolve(p, layout, x, w, scale=scale, bias=bias)
        assert_exact(actual, expected, f"{kind} {layout}")


@pytest.mark.parametrize("c", [3, 20, 33, 40])
@pytest.mark.parametrize("k", [10, 64, 600])
def test_channels_of_any_number(platform, c, k):
    """Channels are padded when packed; the result has the original number."""
    p = problem("odd", (7, 6), 3, c=c, k=k, padding=1, stride=2)
    x, w = operands(p, np.int8)
    given = terms(p, np.uint8)
    expected = requantized(sums(p, x, w), np.uint8, **given)
    for layout in LAYOUTS:
        actual = convolve(p, layout, x, w, out_dtype=np.uint8, **given)
        assert_exact(actual, expected, f"{c} -> {k} {layout}")


@pytest.mark.parametrize("x_dtype", X_DTYPES)
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "sums"])
def test_zero_points(platform, x_dtype, scaled):
    """The convolution of x - zero_point: padding stands for the zero point."""
    p = problem("zero", (9, 8), 3, c=40, k=64, padding=((1, 2), (0, 1)), stride=2)
    x, w = operands(p, X_DTYPES[x_dtype])
    value = 113 if x_dtype == "u8" else -17
    exact = sums(p, x.astype(np.int32) - value, w)
    scale = terms(p, np.int8)["scale"] if scaled else None
    dtype = np.uint8 if scaled else np.int32
    out_value = 131 if scaled else 0
    expected = requantized(exact, dtype, scale=scale, zero_point=out_value)
    for layout in LAYOUTS:
        actual = convolve(
            p,
            layout,
            x,
            w,
            scale=scale,
            out_dtype=dtype,
            zero_point=value,
            out_zero_point=out_value,
        )
        assert_exact(actual, expected, f"{x_dtype} {layout}")


def pixel(acc, dtype, scale, *, traced: bool = False, **options):
    """The results for given sums: x is 1 everywhere, and the image has one pixel."""
    rest = np.asarray(acc, np.int64)
    assert np.abs(rest).max() <= 127 * 96
    x = np.full((1, 1, 1, 96), 1, np.int8)
    w = np.zeros((1, 1, 96, rest.size), np.int8)
    for channel in range(96):
        w[0, 0, channel] = np.clip(rest, -128, 127)
        rest = rest - w[0, 0, channel]

    def call(scale):
        return int8.conv(x, w, scale, out_dtype=dtype, **options)

    return np.asarray(jax.jit(call)(scale) if traced else call(scale)).reshape(-1)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_ties_go_to_even_and_the_rest_saturates(platform, dtype):
    acc = np.array([-999, -257, -5, -3, -1, 0, 1, 3, 5, 253, 255, 257, 509, 511, 513, 9999])
    expected = requantized(acc.astype(np.int32)[None], dtype, scale=0.5)[0]
    np.testing.assert_array_equal(pixel(acc, dtype, 0.5), expected)
    assert set(expected[2:9].tolist()) <= {-2, 0, 2}


def test_numbers_that_are_not_finite(platform):
    """Traced scales: NaN gives 0 before the zero point, infinities saturate. Concrete: refused."""
    scale = np.array([np.nan, np.inf, -np.inf, np.inf, 1e38, -1e38], np.float32)
    acc = [5, 5, 5, 0, 9999, 9999]

    def given(dtype, **options):
        return pixel(acc, dtype, scale, traced=True, **options)

    np.testing.assert_array_equal(given(np.int8), [0, 127, -128, 0, 127, -128])
    np.testing.assert_array_equal(given(np.uint8, out_zero_point=7), [7, 255, 0, 7, 255, 0])
    most = 2**31 - 1
    np.testing.assert_array_equal(given(np.int32), [0, most, -most - 1, 0, most, -most - 1])
    expected = np.array([np.nan, 6, 0, np.nan, 6, 0], np.float32)
    np.testing.assert_array_equal(given(np.float32, activation="relu6"), expected)
    with pytest.raises(ValueError, match=r"scale: expected finite.*nan"):
        pixel(acc, np.int8, scale)


def test_denormal_results_are_kept_and_sums_beyond_2_to_the_24_round(platform):
    p = INT8_BY_NAME["int8_long"]
    x, w = operands(p, np.int8)
    x, w = np.maximum(x, 90), np.maximum(w, 90)
    acc = sums(p, x, w)
    assert acc.max() > 2**24
    for scale in (1e-44, 3e-41, 1.1):
        scale = np.full(p.k, scale, np.float32)
        expected = requantized(acc, np.float32, scale=scale)
        assert np.all(expected != 0)
        for layout in LAYOUTS:
            actual = convolve(p, layout, x, w, scale=scale, out_dtype=np.float32)
            assert_exact(actual, expected, f"{scale[0]} {layout}")


def test_a_negative_zero_and_a_bias_of_zero(platform, native_int8_kernels):
    """Sums of 0 with a negative scale: fma(0, -s, 0) is +0, not -0."""
    y = pixel([0, 0], np.float32, np.array([-1.0, 1.0], np.float32))
    assert not np.signbit(y).any()


# --- transformations ------------------------------------------------------------------------------

P = problem("mapped", (6, 5), 3, n=2, c=32, k=64, padding=1)


def mapped(x, w, scale, bias, residual):
    return int8.conv(x, w, scale, bias, residual, padding=1, residual_scale=0.5, activation="relu")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "which",
    [
        ("x",),
        ("x", "residual"),
        ("x", "scale"),
        ("scale",),
        ("residual",),
        ("w",),
        ("bias",),
        ("x", "w", "scale", "bias", "residual"),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("of_image", [False, True], ids=["channel", "image"])
def test_vmap(platform, layout, which, of_image):
    """Mapped images fold into the batch, mapped filters run one by one; results stay the same."""
    count = 3
    order = ("x", "w", "scale", "bias", "residual")
    examples = []
    for seed in range(count):
        x, w = operands(P, np.int8, seed)
        given = terms(P, np.int8, seed, of_image=of_image)
        residual = given["residual"]
        if layout == "NCHW32":
            x, residual = int8.pack(x), int8.pack(residual)
            w = int8.pack_filter(w)
        examples.append(dict(given, x=x, w=w, residual=residual))
    expected = [
        mapped(*(examples[i if name in which else 0][name] for name in order)) for i in range(count)
    ]
    stacked = [
        jax.tree.map(lambda *a: jnp.stack(a), *(e[name] for e in examples))
        if name in which
        else examples[0][name]
        for name in order
    ]
    axes = tuple(0 if name in which else None for name in order)
    actual = jax.jit(jax.vmap(mapped, in_axes=axes))(*stacked)
    for i in range(count):
        one = jax.tree.map(lambda a, i=i: a[i], actual)
        jax.tree.map(functools.partial(np.testing.assert_array_equal), one, expected[i])


def test_nested_vmap_and_an_inner_axis(platform):
    x, w = operands(P, np.int8)
    scale = terms(P, np.int8)["scale"]
    many = np.stack([np.roll(x, i, 1) for i in range(6)]).reshape(2, 3, *x.shape)
    many = np.moveaxis(many, 1, 4)
    call = jax.vmap(jax.vmap(lambda x: int8.conv(x, w, scale), in_axes=3, out_axes=1))
    actual = jax.jit(call)(many)
    for i, j in np.ndindex(2, 3):
        expected = int8.conv(np.roll(x, 3 * i + j, 1), w, scale)
        np.testing.assert_array_equal(actual[i, :, j], expected)


def test_a_chain_inside_scan_and_outside_jit(platform):
    x, w = operands(problem("chain", 6, 3, c=32, k=32), np.int8)
    filters, packed = int8.pack_filter(w), int8.pack(x)
    scale = np.full(32, 3e-3, np.float32)

    def layer(y, _):
        return int8.conv(y, filters, scale, activation="relu"), None

    scanned, _ = jax.jit(lambda y: jax.lax.scan(layer, y, None, length=3))(packed)
    y = packed
    for _ in range(3):
        y, _ = layer(y, None)
    np.testing.assert_array_equal(scanned.data, y.data)
    assert scanned.channels == 32


def test_twice_the_same_bits(platform):
    p = INT8_BY_NAME["int8_strided"]
    x, w = operands(p, np.int8)
    given = terms(p, np.float32)
    results = [convolve(p, "NCHW32", x, w, out_dtype=np.float32, **given) for _ in range(2)]
    assert results[0].tobytes() == results[1].tobytes()


def test_xla_computes_the_same_bits(platform):
    """Without a kernel, XLA computes the same bits."""
    for p in (*REQUANTIZED, INT8_BY_NAME["int8_1d"]):
        x, w = operands(p, np.uint8)
        for dtype in (np.int8, np.float32):
            given = terms(p, dtype, of_image=True)
            expected = requantized(sums(p, x, w), dtype, activation="relu", **given)
            for layout in layouts(p):
                actual = convolve(
                    p,
                    layout,
                    x,
                    w,
                    out_dtype=dtype,
                    activation="relu",
                    algorithm="xla",
                    **given,
                )
                assert_exact(actual, expected, f"{p.name} {layout}")


def test_a_batch_of_no_images(platform):
    x, w = np.zeros((0, 6, 5, 32), np.int8), np.zeros((3, 3, 32, 64), np.int8)
    y = int8.conv(x, w, np.ones(64, np.float32))
    assert y.shape == (0, 6, 5, 64) and y.dtype == np.int8


def test_padding_that_leaves_nothing_of_the_input_but_zeros(platform):
    x, w = np.ones((1, 4, 4, 32), np.int8), np.ones((1, 1, 32, 32), np.int8)
    y = int8.conv(x, w, padding=((-4, 3), (0, 0)), out_dtype=np.int32)
    np.testing.assert_array_equal(y, np.zeros((1, 3, 4, 32), np.int32))
