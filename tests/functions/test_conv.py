"""The public functions against lax: padding, strides, formats, groups, dtypes, precision."""

from __future__ import annotations

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import assert_exact, on_cpu, reference
from problems import BY_NAME, problem

import jaxconv
from jaxconv._src.problem.spec import Op


def integers(seed: int, *shapes, dtype=np.float32, bound: int = 4) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-bound, bound + 1, shape).astype(dtype) for shape in shapes]


def both(x, w, **parameters):
    """Results of conv_general_dilated, compiled: (this library's, lax's)."""
    ours = jax.jit(functools.partial(jaxconv.conv_general_dilated, **parameters))(x, w)
    return ours, by_lax(x, w, **parameters)


def by_lax(x, w, **parameters):
    return on_cpu(functools.partial(lax.conv_general_dilated, **parameters), x, w)


# --- conv -----------------------------------------------------------------------------------------

FORMATS = {
    "NWC": ("NWC", "WIO", "NWC"),
    "NHWC": ("NHWC", "HWIO", "NHWC"),
    "NDHWC": ("NDHWC", "DHWIO", "NDHWC"),
    "NCW": ("NCW", "OIW", "NCW"),
    "NCHW": ("NCHW", "OIHW", "NCHW"),
    "NCDHW": ("NCDHW", "OIDHW", "NCDHW"),
}
SPATIAL, WINDOW = (6, 7, 5), (3, 2, 3)


def tensors(letters: tuple[str, str, str], n=2, c=4, k=6, groups=1, dtype=np.float32):
    """x and w with axes in the given order of letters."""
    rank = len(letters[0]) - 2
    axes = "DHW"[3 - rank :]
    extents = dict(zip(axes, SPATIAL, strict=False)) | {"N": n, "C": c}
    windows = dict(zip(axes, WINDOW, strict=False)) | {"I": c // groups, "O": k}
    return integers(
        0, [extents[a] for a in letters[0]], [windows[a] for a in letters[1]], dtype=dtype
    )


@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER", "VALID", "same", 1])
@pytest.mark.parametrize("data_format", FORMATS)
def test_every_data_format(platform, data_format, padding):
    letters = FORMATS[data_format]
    x, w = tensors(letters, groups=2)
    rank = x.ndim - 2
    actual = jax.jit(
        lambda x, w: jaxconv.conv(
            x, w, stride=2, padding=padding, groups=2, data_format=data_format
        )
    )(x, w)
    expected = by_lax(
        x,
        w,
        window_strides=(2,) * rank,
        padding=[(padding, padding)] * rank if isinstance(padding, int) else padding.upper(),
        dimension_numbers=letters,
        feature_group_count=2,
    )
    assert_exact(actual, expected, f"{data_format} {padding}")


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_default_format_is_channels_last_of_that_rank(platform, rank):
    letters = FORMATS[("NWC", "NHWC", "NDHWC")[rank - 1]]
    x, w = tensors(letters)
    expected = by_lax(x, w, window_strides=(1,) * rank, padding="SAME", dimension_numbers=letters)
    assert_exact(jaxconv.conv(x, w), expected, "the default format and padding")


@pytest.mark.parametrize(
    ("padding", "pairs"),
    [
        (0, [(0, 0), (0, 0)]),
        (2, [(2, 2), (2, 2)]),
        (np.int64(1), [(1, 1), (1, 1)]),
        ((1, 2), [(1, 1), (2, 2)]),
        ([(1, 2), (0, 3)], [(1, 2), (0, 3)]),
        ((1, (0, 2)), [(1, 1), (0, 2)]),
        (np.array([[1, 2], [0, 1]]).tolist(), [(1, 2), (0, 1)]),
        (-1, [(-1, -1), (-1, -1)]),
        ([(-2, 3), (1, -1)], [(-2, 3), (1, -1)]),
    ],
)
def test_every_form_of_padding(platform, padding, pairs):
    x, w = integers(1, (2, 8, 9, 3), (3, 2, 3, 5))
    expected = by_lax(x, w, window_strides=(1, 1), padding=pairs, dimension_numbers=FORMATS["NHWC"])
    assert_exact(jaxconv.conv(x, w, padding=padding), expected, f"padding {padding}")


@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER", "VALID"])
def test_padding_strings_on_every_remainder(platform, padding):
    """Even and odd extents, windows, strides and dilations: which side gets the odd element."""
    for extent in (5, 6, 7, 8):
        for window in (1, 2, 3, 4):
            for stride, dilation in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 3)):
                x, w = integers(2, (1, extent, 1), (window, 1, 1))
                options = dict(
                    window_strides=(stride,),
                    padding=padding,
                    rhs_dilation=(dilation,),
                    dimension_numbers=FORMATS["NWC"],
                )
                ours, theirs = (
                    jax.eval_shape(functools.partial(f, **options), x, w)
                    for f in (jaxconv.conv_general_dilated, lax.conv_general_dilated)
                )
                assert ours.shape == theirs.shape, (extent, window, stride, dilation)
    # The numbers show where the padding went: each axis has one odd element.
    x, w = integers(2, (2, 6, 7, 3), (4, 3, 3, 5))
    for stride in (1, 2, 3):
        ours, theirs = both(
            x,
            w,
            window_strides=(stride, stride),
            padding=padding,
            rhs_dilation=(1, 2),
            dimension_numbers=FORMATS["NHWC"],
        )
        assert_exact(ours, theirs, f"{padding} stride {stride}")


@pytest.mark.parametrize("stride", [1, 2, (1, 3), [3, 2], np.int32(2)])
@pytest.mark.parametrize("dilation", [1, 2, (2, 1)])
def test_strides_and_dilations(platform, stride, dilation):
    x, w = integers(3, (2, 11, 12, 3), (3, 3, 3, 4))
    actual = jaxconv.conv(x, w, stride=stride, dilation=dilation, padding="VALID")
    pair = [tuple(np.broadcast_to(v, 2).tolist()) for v in (stride, dilation)]
    expected = by_lax(
        x,
        w,
        window_strides=pair[0],
        padding="VALID",
        rhs_dilation=pair[1],
        dimension_numbers=FORMATS["NHWC"],
    )
    assert_exact(actual, expected, f"stride {stride} dilation {dilation}")


def test_a_call_is_the_same_inside_and_outside_jit(platform):
    x, w = integers(4, (2, 8, 8, 3), (3, 3, 3, 4))
    assert_exact(jaxconv.conv(x, w), jax.jit(jaxconv.conv)(x, w), "jit")


def test_lists_and_python_scalars_are_arrays(platform):
    assert_exact(
        jaxconv.conv([[[1.0], [2.0], [3.0]]], [[[1.0]], [[10.0]]], padding="VALID"),
        np.array([[[21.0], [32.0]]], np.float32),
        "lists",
    )


def test_cross_correlation_not_convolution(platform):
    """The filter is not flipped: the docstring's definition, summed by hand."""
    x = np.arange(1.0, 6.0, dtype=np.float32).reshape(1, 5, 1)
    w = np.array([1, 10, 100], np.float32).reshape(3, 1, 1)
    y = jaxconv.conv(x, w, padding=((1, 0),), stride=2)
    assert np.asarray(y).ravel().tolist() == [210.0, 432.0]


# --- conv_general_dilated -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dimension_numbers",
    [
        None,
        ("NCHW", "OIHW", "NCHW"),
        ("NHWC", "HWIO", "NHWC"),
        ("NHWC", "OHWI", "NCHW"),
        ("CNHW", "IHWO", "HWNC"),
        ("HWNC", "HWOI", "CHWN"),
        ("WNHC", "OWIH", "NWCH"),
        lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)),
    ],
    ids=str,
)
def test_every_form_of_dimension_numbers(platform, dimension_numbers):
    """Every permutation of the axes, with gradients."""
    numbers = lax.conv_dimension_numbers((2,) * 4, (2,) * 4, dimension_numbers)
    shapes = []
    for spec, extents in ((numbers.lhs_spec, (2, 4, 7, 6)), (numbers.rhs_spec, (6, 2, 3, 2))):
        shape = [0] * 4
        for axis, extent in zip(spec, extents, strict=True):
            shape[axis] = extent
        shapes.append(shape)
    x, w = integers(5, *shapes)

    def with_gradients(f):
        call = functools.partial(
            f,
            window_strides=(2, 1),
            padding=((1, 1), (0, 2)),
            rhs_dilation=(1, 2),
            dimension_numbers=dimension_numbers,
            feature_group_count=2,
        )

        def run(x, w):
            y, vjp = jax.vjp(call, x, w)
            return y, *vjp(jnp.sign(y))

        return run

    ours = jax.jit(with_gradients(jaxconv.conv_general_dilated))(x, w)
    theirs = on_cpu(with_gradients(lax.conv_general_dilated), x, w)
    for name, a, b in zip(("y", "dx", "dw"), ours, theirs, strict=True):
        assert_exact(a, b, f"{name} with {dimension_numbers}")


@pytest.mark.parametrize("letters", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "CHWN")], ids=str)
@pytest.mark.parametrize("count", [2, 4])
def test_batch_groups(platform, letters, count):
    x, w = tensors(letters, n=8, k=12)
    parameters = dict(
        window_strides=(1, 2),
        padding="SAME",
        dimension_numbers=letters,
        batch_group_count=count,
        precision="highest",  # cotangents exceed TF32's mantissa
    )
    assert_exact(*both(x, w, **parameters), f"batch_group_count {count}")

    def gradients(f):
        def loss(x, w):
            return jnp.sum(f(x, w, **parameters) ** 2)

        return jax.grad(loss, argnums=(0, 1))

    ours = jax.jit(gradients(jaxconv.conv_general_dilated))(x, w)
    theirs = on_cpu(gradients(lax.conv_general_dilated), x, w)
    for a, b in zip(ours, theirs, strict=True):
        assert_exact(a, b, f"gradient with batch_group_count {count}")


@pytest.mark.parametrize("groups", [2, 4])
def test_feature_groups(platform, groups):
    x, w = tensors(FORMATS["NHWC"], c=8, k=12, groups=groups)
    ours, theirs = both(
        x,
        w,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=FORMATS["NHWC"],
        feature_group_count=groups,
    )
    assert_exact(ours, theirs, f"{groups} groups")


@pytest.mark.parametrize("lhs_dilation", [(2, 2), (1, 3)])
@pytest.mark.parametrize("padding", ["VALID", [(1, 2), (0, 1)], [(-1, 0), (2, -2)]])
def test_lhs_dilation(platform, lhs_dilation, padding):
    x, w = integers(6, (2, 5, 6, 4), (3, 3, 4, 5))
    if padding == "VALID":
        padding = [(0, 0), (0, 0)]
    ours, theirs = both(
        x,
        w,
        window_strides=(1, 2),
        padding=padding,
        lhs_dilation=lhs_dilation,
        dimension_numbers=FORMATS["NHWC"],
    )
    assert_exact(ours, theirs, f"lhs_dilation {lhs_dilation} padding {padding}")


# --- conv_transpose -------------------------------------------------------------------------------


def transposed_both(x, w, *arguments, **parameters):
    """Results of conv_transpose and its gradients: (this library's, lax's)."""

    def with_gradients(f):
        def run(x, w):
            y, vjp = jax.vjp(lambda x, w: f(x, w, *arguments, **parameters), x, w)
            return y, *vjp(jnp.sign(y))

        return run

    ours = jax.jit(with_gradients(jaxconv.conv_transpose))(x, w)
    return zip(ours, on_cpu(with_gradients(lax.conv_transpose), x, w), strict=True)


@pytest.mark.parametrize("padding", ["SAME", "VALID", [(1, 2), (0, 1)], [(3, -1), (2, 2)]], ids=str)
@pytest.mark.parametrize("strides", [(1, 1), (2, 3), (5, 4)], ids=str)
@pytest.mark.parametrize("dilation", [None, (1, 2)], ids=str)
def test_conv_transpose(platform, padding, strides, dilation):
    x, w = integers(20, (2, 4, 5, 3), (3, 4, 3, 6))
    for a, b in transposed_both(x, w, strides, padding, rhs_dilation=dilation):
        assert_exact(a, b, f"strides {strides} padding {padding} dilation {dilation}")


@pytest.mark.parametrize("padding", ["SAME", "VALID", [(1, 0), (0, 2)]], ids=str)
@pytest.mark.parametrize("transpose_kernel", [False, True])
def test_conv_transpose_kernel_and_padding_of_the_other_convolution(
    platform, padding, transpose_kernel
):
    x, w = integers(21, (2, 4, 5, 3), (3, 4, 6, 3) if transpose_kernel else (3, 4, 3, 6))
    options = dict(transpose_kernel=transpose_kernel, use_consistent_padding=True)
    for a, b in transposed_both(x, w, (2, 2), padding, **options):
        assert_exact(a, b, f"{padding} {options}")


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_conv_transpose_defaults_by_rank(platform, rank):
    x, w = integers(22, (2, *(4, 5, 3)[:rank], 3), (*(3, 2, 2)[:rank], 3, 4))
    for a, b in transposed_both(x, w, (2,) * rank, "SAME"):
        assert_exact(a, b, f"{rank} spatial axes")
    x, w = x.transpose(0, -1, *range(1, rank + 1)), w.transpose(-1, -2, *range(rank))
    for a, b in transposed_both(x, w, (2,) * rank, "VALID", dimension_numbers=numbers_of(rank)):
        assert_exact(a, b, f"{rank} spatial axes, channels first")


def numbers_of(rank: int) -> lax.ConvDimensionNumbers:
    return lax.conv_dimension_numbers((2,) * (rank + 2), (2,) * (rank + 2), None)


def test_conv_transpose_is_the_data_gradient_of_a_convolution(platform, native_kernels):
    """It is one call, which reads the filter without a copy."""
    x, dy, w = integers(23, (2, 8, 8, 3), (2, 4, 4, 6), (3, 3, 3, 6))
    _, vjp = jax.vjp(lambda x: jaxconv.conv(x, w, stride=2), x)
    transposed = functools.partial(
        jaxconv.conv_transpose, strides=(2, 2), padding="SAME", transpose_kernel=True
    )
    assert_exact(transposed(dy, w), vjp(dy)[0], "transpose_kernel")
    text = jax.jit(transposed).lower(dy, w).as_text()
    assert "jaxconv_dgrad" in text and "stablehlo.reverse" not in text
    assert "stablehlo.transpose" not in text


@pytest.mark.parametrize("name", ["conv_general_dilated", "conv_transpose"])
def test_the_signature_is_that_of_lax(name):
    """Positional arguments mean the same, and libraries can take either function."""
    import inspect

    ours = list(inspect.signature(getattr(jaxconv, name)).parameters.values())
    theirs = list(inspect.signature(getattr(lax, name)).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [
        (p.name, p.default) for p in theirs
    ]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_no_spatial_axes(platform):
    """A convolution without spatial axes is a matrix product."""
    x, w = integers(7, (4, 6), (8, 3))
    ours, theirs = both(x, w, window_strides=(), padding=(), feature_group_count=2)
    assert_exact(ours, theirs, "0-D")


def test_four_spatial_axes_go_to_xla_and_say_so(platform, caplog):
    x, w = integers(8, (1, 2, 3, 3, 3, 3), (2, 2, 2, 2, 2, 2))

    def lower(f):
        return jax.jit(lambda x, w: f(x, w, (1,) * 4, "VALID")).lower(x, w)

    with caplog.at_level(logging.INFO, logger="jaxconv"):
        text = lower(jaxconv.conv_general_dilated).as_text()
    assert "stablehlo.convolution" in text
    assert any("4 spatial axes" in record.getMessage() for record in caplog.records)


# --- dtypes and precision -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operand", "result"),
    [
        (np.float16, np.float32),
        (jnp.bfloat16, np.float32),
        (np.float32, np.float32),
        (np.int8, np.int32),
        (np.int16, np.int32),
        (np.uint8, np.uint32),
    ],
)
def test_preferred_element_type(platform, operand, result):
    x, w = (np.abs(a) for a in integers(9, (2, 8, 8, 4), (3, 3, 4, 6), dtype=np.int32))
    y = jaxconv.conv(x.astype(operand), w.astype(operand), padding=1, preferred_element_type=result)
    p = problem("p", 8, 3, c=4, k=6, padding=1)
    assert_exact(y, reference(Op.FPROP, p, x, w).astype(result), f"{operand} -> {result}")


def test_bool_is_lax_s_and_goes_to_xla():
    x, w = (a > 0 for a in integers(30, (2, 5, 5, 3), (3, 3, 3, 4)))
    with jax.default_device(jax.devices("cpu")[0]):
        ours = jaxconv.conv(x, w)
        theirs = by_lax(
            x, w, window_strides=(1, 1), padding="SAME", dimension_numbers=FORMATS["NHWC"]
        )
    assert_exact(ours, theirs, "bool")


def test_int8_without_a_preferred_type_wraps_as_lax_does(platform):
    x, w = integers(10, (1, 6, 6, 8), (3, 3, 8, 4), dtype=np.int8, bound=60)
    assert_exact(
        *both(x, w, window_strides=(1, 1), padding="SAME", dimension_numbers=FORMATS["NHWC"]),
        "int8",
    )


@pytest.mark.parametrize("dtype", [np.float64, np.complex64, np.complex128])
def test_wide_and_complex_dtypes_fall_back_and_say_so(platform, dtype, caplog):
    with jax.enable_x64(True), caplog.at_level(logging.INFO, logger="jaxconv"):
        x, w = integers(11, (2, 6, 6, 4), (3, 3, 4, 4), dtype=dtype)
        if np.issubdtype(dtype, np.complexfloating):
            x, w = x + 1j * x[::-1], w - 2j * w[::-1]
            x, w = x.astype(dtype), w.astype(dtype)

        def gradients(f):
            def loss(x, w):
                y = f(x, w, (1, 1), "SAME", dimension_numbers=FORMATS["NHWC"])
                return jnp.sum(jnp.real(y) ** 2 + jnp.imag(y))

            return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, w)

        ours, theirs = gradients(jaxconv.conv_general_dilated), gradients(lax.conv_general_dilated)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)
        assert ours[1][0].dtype == dtype
    name = np.dtype(dtype).name
    reasons = [r.getMessage() for r in caplog.records if r.name == "jaxconv"]
    assert len(reasons) == 3 and all(f"no kernel for dtype {name}" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (None, "default"),
        ("default", "default"),
        ("high", "high"),
        ("highest", "highest"),
        ("float32", "highest"),
        (lax.Precision.HIGH, "high"),
        (lax.Precision.HIGHEST, "highest"),
        (("default", "highest"), "highest"),
        ((lax.Precision.HIGH, lax.Precision.DEFAULT), "high"),
    ],
    ids=str,
)
def test_every_form_of_precision(precision, expected):
    x, w = integers(12, (1, 4, 4, 2), (3, 3, 2, 2))
    jaxpr = jax.make_jaxpr(lambda x, w: jaxconv.conv(x, w, precision=precision))(x, w)
    (spec,) = re.findall(r"precision='(\w+)'", str(jaxpr))
    assert spec == expected


@pytest.mark.parametrize(("name", "expected"), [("high", "high"), ("float32", "highest")])
def test_the_global_default_precision_counts(name, expected):
    x, w = integers(12, (1, 4, 4, 2), (3, 3, 2, 2))
    with jax.default_matmul_precision(name):
        jaxpr = jax.make_jaxpr(jaxconv.conv)(x, w)
    assert f"precision='{expected}'" in str(jaxpr)


@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_every_precision_runs(platform, precision):
    x, w = integers(13, (2, 8, 8, 4), (3, 3, 4, 6))
    p = problem("p", 8, 3, c=4, k=6, padding=1)
    expected = reference(Op.FPROP, p, x, w).astype(np.float32)
    assert_exact(jaxconv.conv(x, w, precision=precision), expected, precision)


# --- algorithm ------------------------------------------------------------------------------------


def test_algorithm_xla_is_lax(platform):
    x, w = integers(14, (2, 8, 8, 4), (3, 3, 4, 6))
    text = jax.jit(lambda x, w: jaxconv.conv(x, w, algorithm="xla")).lower(x, w).as_text()
    assert "custom_call" not in text and "stablehlo.convolution" in text


def test_every_family_can_be_asked_for(platform, native_kernels):
    """For a problem that a family takes, the family's name selects one of its instances."""
    p = BY_NAME["plain"]
    families = native_kernels.module.families()
    assert families
    served = set()
    for family in families:
        for op in Op:
            instance = native_kernels.module.select(p.line(op, "f32"), family, "")[0]
            if instance:
                served.add(family)
                assert instance.startswith(f"{op.value}_{family}_"), (instance, family)
    assert served, families


def test_installed_version_is_the_package_version():
    from importlib import metadata

    try:
        installed = metadata.version("jaxconv")
    except metadata.PackageNotFoundError:
        pytest.skip("jaxconv is imported from a checkout and not installed")
    assert installed == jaxconv.__version__
