"""Convolution with this library's kernels: ``conv``, and counterparts of ``jax.lax``."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, cast, overload

import jax
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxconv._src.call import selection
from jaxconv._src.conv import canonical, fused, primitives
from jaxconv._src.functions import arguments
from jaxconv._src.functions.arguments import (
    Algorithm,
    DimensionNumbers,
    OutSharding,
    Padding,
    PrecisionLike,
)
from jaxconv._src.int8 import int8_lax
from jaxconv._src.problem import epilogue, layouts
from jaxconv._src.problem.epilogue import Activation
from jaxconv._src.problem.spec import Op
from jaxconv._src.problem.spelling import knows
from jaxconv._src.sharding import explicit_mesh
from jaxconv._src.winograd import winograd_prepared
from jaxconv._src.winograd.winograd_filter import PreparedFilter

selection.INTEGERS["cuda"] = int8_lax  # whose kernels for 8-bit operands all belong to conv_int8_p


_NAMES = {
    **arguments.OF_WINDOW,
    **arguments.OF_EPILOGUE,
    "feature_group_count": "groups",
    "layout": "data_format",
    **dict.fromkeys(("out_dtype", "dtype"), "preferred_element_type"),
    "dimension_numbers": "'data_format' has two orders, jaxconv.conv_general_dilated has any",
    **dict.fromkeys(
        ("lhs_dilation", "input_dilation", "transposed"),
        "jaxconv.conv_transpose and jaxconv.conv_general_dilated dilate the input",
    ),
    "batch_group_count": "jaxconv.conv_general_dilated has it",
    "out_sharding": "jaxconv.conv_general_dilated has it",
}


@overload
def conv(
    x: ArrayLike,
    w: ArrayLike | PreparedFilter,
    *,
    stride: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    data_format: str | None = None,
    precision: PrecisionLike = None,
    algorithm: Algorithm = "auto",
    preferred_element_type: DTypeLike | None = None,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation = None,
    statistics: Literal[False] = False,
) -> jax.Array: ...


@overload
def conv(
    x: ArrayLike,
    w: ArrayLike | PreparedFilter,
    *,
    stride: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    data_format: str | None = None,
    precision: PrecisionLike = None,
    algorithm: Algorithm = "auto",
    preferred_element_type: DTypeLike | None = None,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation = None,
    statistics: Literal[True],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@knows(**_NAMES)
def conv(
    x: ArrayLike,
    w: ArrayLike | PreparedFilter,
    *,
    stride: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    data_format: str | None = None,
    precision: PrecisionLike = None,
    algorithm: Algorithm = "auto",
    preferred_element_type: DTypeLike | None = None,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation = None,
    statistics: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array, jax.Array]:
    """Convolves one or a batch of 1-D, 2-D or 3-D signals with a bank of filters.

    With i = p * stride + r * dilation - pad_lo on every spatial axis,

        y[n, p, k] = sum over r and c of x[n, i, c] * w[r, c, k]

    (cross-correlation, as everywhere in deep learning; c runs over the channels of k's group). It
    works inside jit, grad, jvp, vmap, scan and shard_map, and has derivatives of any order.

    Args:
        x: input, (N, *spatial, C) or, in channel-first formats, (N, C, *spatial); or one example,
            without N.
        w: filters, (*window, C / groups, K) or, in channel-first formats,
            (K, C / groups, *window). Operands of two dtypes are converted to one by JAX's
            promotion, as in ``jax.numpy``. Or a filter that ``jaxconv.winograd.prepare`` made, from
            the dtype of x: Winograd with its tile is then the algorithm, and the result has no
            derivative.
        stride: step of the window, one number or one per spatial axis.
        padding: "SAME", "SAME_LOWER", "VALID", one number for all sides, or per spatial axis a
            number or a pair (low, high). Negative padding crops. As in Flax, "CIRCULAR" and
            "REFLECT" pad like "SAME" at stride 1, with the periodic continuation or the mirror
            image of the input instead of zeros (on a padded copy); "CAUSAL", for one spatial axis,
            pads the low side only, so that no output depends on later inputs.
        dilation: step between the taps of a filter, one number or one per spatial axis.
        groups: number of independent slices of the channels; divides C and K. ``groups=C`` is a
            depthwise convolution.
        data_format: "NWC", "NHWC" or "NDHWC", also called "channels_last" (the default, by the rank
            of w), or "NCW", "NCHW" or "NCDHW", also called "channels_first"; in any case.
        precision: least accuracy for float32 operands, in any form that ``jax.lax`` takes.
        algorithm: "auto", the kernel that is predicted to be fastest, or XLA's own convolution if
            that is predicted to be faster than every kernel; "native", the same without XLA as a
            candidate: XLA computes only problems that no kernel accepts (the environment variable
            JAXCONV_ALGORITHM=native gives "auto" this meaning in a process); a kernel family
            ("igemm_simt", "onednn"); an instance name; "winograd", or with its tile
            "winograd_f2x2", "winograd_f4x4", "winograd_f6x6", "winograd_f2x3" or "winograd_f4x3"
            (both along W only), for 3x3 filters at stride 1, with fewer multiplications and a
            larger error, which docs/winograd.md states (weight gradients are then "auto");
            "auto+winograd", "auto+winograd_f4x4" and so on, "auto" with Winograd kernels as
            additional candidates; "im2col", XLA's matrix product with a matrix of all windows;
            "xla", XLA's own convolution; or a mapping from some of the directions "fprop", "dgrad"
            and "wgrad" to one of these (the others are "auto").
        preferred_element_type: dtype of the result; by default that of the operands. int8 operands
            accumulate exactly into int32.
        scale, bias, residual, activation: the epilogue, for floating-point operands. With the sums
            above in float32 (float64 for float64 operands), the result is

                activation(scale[k] * y[n, p, k] + bias[k] + residual[n, p, k])

            rounded once, in one kernel call if a kernel computes it (``explain`` says whether);
            otherwise XLA computes it from float32 sums. scale and bias are (K,), read as float32;
            residual has the shape and the dtype of the result. The activation is "relu", "relu6",
            ("leaky_relu", slope), "gelu" (exact), "gelu_tanh", "silu", "sigmoid", "tanh" or
            "hard_swish", in any case, or the function of ``jax.nn`` (whose ``gelu`` is
            "gelu_tanh"). For its derivative the backward pass keeps only the result; for gelu,
            gelu_tanh, silu, hard_swish, and leaky_relu without a positive slope also the
            activation's argument, which the same call stores in the result's dtype.
        statistics: also return mean and variance of every output channel, what batch normalisation
            takes of a batch: of the result as rounded, over examples and positions. A kernel that
            computes them does so while it stores the result, in the same order in every run;
            otherwise XLA reads the result again (``explain`` says so). Sharded arrays give the
            statistics of the whole array; inside ``shard_map``, those of each device's part.

    Returns:
        (N, *out_spatial, K), or (N, K, *out_spatial) in channel-first formats; without N for one
        example. With ``statistics`` a triple of this result, the mean and the variance, float32
        (K,) (float64 for float64 operands); the variance is the mean of the squared deviations from
        the mean.

    Raises:
        TypeError: an operand is no array of numbers, the operands' dtype cannot give
            ``preferred_element_type``, integers or complex numbers have an epilogue, or
            ``statistics`` is no bool.
        ValueError: two dtypes do not promote (JAX's ``TypePromotionError``); ranks, channels,
            groups, window parameters, format or a term of the epilogue do not fit; or the demanded
            algorithm cannot compute the problem (the message says why, and which algorithms can).
    """
    prepared: PreparedFilter | None = None
    if not isinstance(w, PreparedFilter):
        x, w = arguments.operands("x", x, "w", w, promote=True)
        data_format = layouts.data_format(data_format, w.shape)
    else:
        prepared = w
        x = arguments.array("x", x)
        winograd_prepared.check(x, prepared)
        data_format = layouts.data_format(data_format, prepared.shape)
        filter_format = layouts.numbers(data_format)[1]
        w = jax.ShapeDtypeStruct(prepared.shape_in(filter_format), x.dtype)
    rank = len(data_format) - 2
    if w.ndim != rank + 2:
        raise ValueError(
            f"w: expected {rank + 2} dimensions, data_format is {data_format}; got shape {w.shape}"
        )
    if x.ndim not in (rank + 1, rank + 2):
        raise ValueError(
            f"x: expected {rank + 2} dimensions, {data_format}, or {rank + 1} for one example; got "
            f"shape {x.shape} beside w of shape {w.shape}"
        )
    one_example = x.ndim == rank + 1
    if one_example:
        x = lax.expand_dims(x, (0,))
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, layouts.numbers(data_format))
    lhs, rhs, _ = numbers
    window: dict[str, Any] = dict(
        stride=arguments.per_axis("stride", stride, rank),
        lhs_dilation=(1,) * rank,
        dilation=arguments.per_axis("dilation", dilation, rank),
        groups=arguments.integer("groups", groups, at_least=1),
    )
    x, padding = arguments.continued(
        x, lhs[2:], padding, [w.shape[a] for a in rhs[2:]], window["dilation"]
    )
    spec = arguments.forward_spec(
        x,
        w,
        numbers,
        padding,
        precision=arguments.precision(precision),
        algorithm=arguments.algorithms(algorithm),
        **window,
    )
    out_dtype = arguments.result_dtype(x.dtype, preferred_element_type)
    sizes = spec.sizes(Op.FPROP, x.shape, w.shape)
    form, terms = epilogue.checked(
        scale,
        bias,
        residual,
        activation,
        operand_dtype=x.dtype,
        channels=sizes.k,
        out_shape=spec.shape("y", sizes)[one_example:],
        out_dtype=out_dtype,
        statistics=statistics,
    )
    if one_example and form.residual:
        terms["residual"] = lax.expand_dims(terms["residual"], (0,))
    given = cast(jax.Array, w)
    if prepared is None:
        convolved = functools.partial(primitives.bind, Op.FPROP, x, given, spec)
    else:
        convolved = functools.partial(winograd_prepared.bind, x, prepared, spec)
    if form.plain:
        results = [convolved(out_dtype)]
    elif prepared is None:
        results = fused.bind(x, given, terms, spec=spec, epilogue=form, out_dtype=out_dtype)
    else:
        acc = convolved(epilogue.accumulator_dtype(out_dtype))
        results = epilogue.finish(acc, terms, spec.axis("y", "k"), form, out_dtype)
    y = lax.squeeze(results[0], (0,)) if one_example else results[0]
    if not form.statistics:
        return y
    count = math.prod(spec.shape("y", sizes)[a] for a in spec.y_axes[:-1])
    return y, results[-1][0], results[-1][1] / count


_LAX_NAMES = {
    **dict.fromkeys(("dilation", "dilations"), "rhs_dilation"),
    **dict.fromkeys(("x", "input", "inputs"), "lhs"),
    **dict.fromkeys(("w", "weight", "kernel", "filter"), "rhs"),
    **dict.fromkeys(("data_format", "layout"), "dimension_numbers"),
    **dict.fromkeys(("out_dtype", "dtype"), "preferred_element_type"),
}


@knows(
    **_LAX_NAMES,
    **dict.fromkeys(("stride", "strides"), "window_strides"),
    **dict.fromkeys(("scale", "bias", "residual", "activation"), "jaxconv.conv has it"),
    groups="feature_group_count",
)
def conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: DimensionNumbers = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: OutSharding = None,
    *,
    algorithm: Algorithm = "auto",
) -> jax.Array:
    """``jax.lax.conv_general_dilated`` on this library's kernels, with the same parameters.

    Args:
        lhs: input of n + 2 dimensions, in the order of ``dimension_numbers``.
        rhs: filters of n + 2 dimensions; same dtype as lhs.
        window_strides: n strides.
        padding: "SAME", "SAME_LOWER", "VALID" or n pairs (low, high); negative padding crops.
        lhs_dilation: n dilations of the input (transposed convolution), default 1.
        rhs_dilation: n dilations of the filter, default 1.
        dimension_numbers: as in ``jax.lax``: None, three strings or ``ConvDimensionNumbers``.
        feature_group_count: groups of channels.
        batch_group_count: groups of the batch; each produces its own slice of the output channels.
        precision: least accuracy for float32 operands, in any form that ``jax.lax`` takes.
        preferred_element_type: dtype of the result; by default that of the operands.
        out_sharding: None, or the sharding of the result on a mesh with explicit axes: a
            ``NamedSharding`` or a ``PartitionSpec``.
        algorithm: as in ``conv``.

    Returns:
        The output, in the order of ``dimension_numbers``.

    Raises:
        TypeError: operand dtypes differ, or cannot give ``preferred_element_type``.
        ValueError: shapes, groups or window parameters do not fit.
    """
    lhs, rhs, numbers = _lax_operands(lhs, rhs, dimension_numbers)
    rank = lhs.ndim - 2
    lhs_dilation = arguments.per_axis(
        "lhs_dilation", 1 if lhs_dilation is None else lhs_dilation, rank
    )
    arguments.no_padding_by_name(padding, lhs_dilation)
    y = _convolve(
        lhs,
        rhs,
        numbers=numbers,
        stride=arguments.per_axis("window_strides", window_strides, rank),
        padding=padding,
        lhs_dilation=lhs_dilation,
        dilation=arguments.per_axis(
            "rhs_dilation", 1 if rhs_dilation is None else rhs_dilation, rank
        ),
        groups=feature_group_count,
        batch_groups=batch_group_count,
        precision=precision,
        algorithm=algorithm,
        preferred_element_type=preferred_element_type,
    )
    return explicit_mesh.with_out_sharding(y, out_sharding)


def conv_with_general_padding(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """``jax.lax.conv_with_general_padding``: ``conv_general_dilated`` in NCHW with OIHW filters.

    Args:
        lhs: input, (N, C, *spatial).
        rhs: filters, (K, C, *window); same dtype as lhs.
        window_strides, padding, lhs_dilation, rhs_dilation, precision, preferred_element_type: as
            in ``conv_general_dilated``.

    Returns:
        The output, (N, K, *out_spatial).

    Raises:
        TypeError, ValueError: as ``conv_general_dilated``.
    """
    return conv_general_dilated(
        lhs,
        rhs,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


@knows(
    **_LAX_NAMES,
    **arguments.OF_EPILOGUE,
    **dict.fromkeys(("stride", "window_strides"), "strides"),
    feature_group_count="groups",
)
def conv_transpose(
    lhs: ArrayLike,
    rhs: ArrayLike,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: DimensionNumbers = None,
    transpose_kernel: bool = False,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    use_consistent_padding: bool = False,
    *,
    groups: int = 1,
    output_padding: int | Sequence[int] | None = None,
    algorithm: Algorithm = "auto",
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation = None,
) -> jax.Array:
    """``jax.lax.conv_transpose`` on this library's kernels, with additional parameters.

    It is computed as the data gradient of a convolution: no zeros are inserted or multiplied.

    ``torch.nn.functional.conv_transpose2d(x, w, None, s, p, output_padding, groups, d)`` is

        conv_transpose(x, w, (s, s), [(p, p)] * 2, (d, d), ("NCHW", "OIHW", "NCHW"),
                       transpose_kernel=True, use_consistent_padding=True,
                       groups=groups, output_padding=output_padding)

    with w as PyTorch stores it, (C, K / groups, R, S). ``tf.keras.layers.Conv2DTranspose`` is the
    same with ("NHWC", "HWIO", "NHWC") and its filter (R, S, K, C). Its padding "same" is "SAME"
    here; with ``output_padding`` it is the pairs (r // 2, r // 2) with r = (R - 1) d + 1, and
    ``use_consistent_padding``.

    Args:
        lhs: input of n + 2 dimensions.
        rhs: filters of n + 2 dimensions; same dtype as lhs.
        strides: n fractional strides: every axis grows by about this factor.
        padding: "SAME" or "VALID", as of the convolution that this one transposes, or n pairs (low,
            high) that pad the dilated input; with ``use_consistent_padding``, the pairs also belong
            to the other convolution, as in PyTorch. Without it, if every stride is 1, the other
            names of ``conv_general_dilated`` have the meaning that they have there, as in lax.
        rhs_dilation: n dilations of the filter, default 1.
        dimension_numbers: as in ``conv_general_dilated``, by default channels last: ("NHWC",
            "HWIO", "NHWC") for two spatial axes.
        transpose_kernel: reverses the window and swaps the filter's channel axes, so that the
            result is the data gradient of a convolution with this filter, as in Keras.
        precision, preferred_element_type, algorithm: as in ``conv_general_dilated``; the algorithm
            is that of the direction "dgrad".
        use_consistent_padding: see ``padding``.
        groups: number of independent slices of the channels. The filter's input channels, or with
            ``transpose_kernel`` its output channels (as in PyTorch), are those of one group.
        output_padding: additional outputs on the high side, one number or one per spatial axis,
            each less than the stride or the dilation there. It selects among the sizes for which a
            convolution with this stride has the size of lhs.
        scale, bias, residual, activation: the epilogue, as in ``conv``: float32 sums, one rounding.
            No kernel combines it with a data gradient: XLA computes it in one elementwise pass.

    Returns:
        The output, in the order of ``dimension_numbers``.

    Raises:
        TypeError, ValueError: as ``conv_general_dilated``.
    """
    if dimension_numbers is None:
        channels_last = {2: "", 3: "H", 4: "HW", 5: "HWD"}
        if np.ndim(lhs) not in channels_last:
            raise ValueError(f"dimension_numbers: no default for {np.ndim(lhs)} dimensions")
        spatial = channels_last[np.ndim(lhs)]
        dimension_numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    lhs, rhs, numbers = _lax_operands(lhs, rhs, dimension_numbers)
    rank = lhs.ndim - 2
    strides = arguments.per_axis("strides", strides, rank)
    dilation = arguments.per_axis("rhs_dilation", 1 if rhs_dilation is None else rhs_dilation, rank)
    window = tuple(rhs.shape[axis] for axis in numbers.rhs_spec[2:])
    pads = arguments.transposed_padding(padding, window, strides, dilation, use_consistent_padding)
    if output_padding is not None:
        in_spatial = tuple(lhs.shape[axis] for axis in numbers.lhs_spec[2:])
        pads = arguments.padding_pairs(pads, in_spatial, window, (1,) * rank, dilation)
        extra = arguments.output_padding(output_padding, strides, dilation)
        pads = [(lo, hi + e) for (lo, hi), e in zip(pads, extra, strict=True)]
    groups = arguments.integer("groups", groups, at_least=1)
    if transpose_kernel:
        out_features, in_features, *spatial = numbers.rhs_spec
        if groups > 1:  # converts the other convolution's filter to lax's form
            if rhs.shape[out_features] % groups:
                raise ValueError(
                    f"groups: {groups} does not divide the {rhs.shape[out_features]} channels of "
                    f"rhs {rhs.shape} that meet those of lhs {lhs.shape}"
                )
            rhs = explicit_mesh.move_groups(rhs, out_features, in_features, groups)
        numbers = numbers._replace(rhs_spec=(in_features, out_features, *spatial))
    return _convolve(
        lhs,
        rhs,
        numbers=numbers,
        stride=(1,) * rank,
        padding=pads,
        lhs_dilation=strides,
        dilation=dilation,
        groups=groups,
        groups_name="groups",
        transposed=True,
        filter_reversed=transpose_kernel,
        precision=precision,
        algorithm=algorithm,
        preferred_element_type=preferred_element_type,
        terms=(scale, bias, residual, activation),
    )


def _lax_operands(lhs: ArrayLike, rhs: ArrayLike, dimension_numbers: DimensionNumbers):
    """Checks operands of lax's entry points, in any axis order, 0-D and up."""
    lhs, rhs = arguments.operands("lhs", lhs, "rhs", rhs)
    if lhs.ndim != rhs.ndim:
        raise ValueError(f"rhs: expected {lhs.ndim} dimensions as lhs has, got shape {rhs.shape}")
    if lhs.ndim < 2:
        raise ValueError(f"lhs: expected at least 2 dimensions, got shape {lhs.shape}")
    try:
        return lhs, rhs, lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    except TypeError as error:
        raise ValueError(f"dimension_numbers: {error}") from error


def _convolve(
    lhs,
    rhs,
    *,
    numbers: lax.ConvDimensionNumbers,
    stride: tuple[int, ...],
    padding: Padding,
    lhs_dilation: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: Any,
    precision: PrecisionLike,
    algorithm: Algorithm,
    preferred_element_type: DTypeLike | None,
    groups_name: str = "feature_group_count",
    batch_groups: Any = 1,
    transposed: bool = False,
    filter_reversed: bool = False,
    terms: tuple = (None, None, None, None),
) -> jax.Array:
    """Checks a convolution in lax's form and binds its canonical form, fprop or dgrad.

    ``transposed`` requests dgrad, which is also the form for a dilated input. With
    ``filter_reversed``, rhs is then the filter of the convolution that this one transposes.
    ``terms``: those of the epilogue.
    """
    groups = arguments.integer(groups_name, groups, at_least=1)
    batch_groups = arguments.integer("batch_group_count", batch_groups, at_least=1)
    window = dict(stride=stride, lhs_dilation=lhs_dilation, dilation=dilation)
    pairs = arguments.checked_padding(
        lhs,
        rhs,
        numbers,
        padding,
        ("lhs", "rhs", groups_name),
        **window,
        groups=groups,
        batch_groups=batch_groups,
    )
    lhs_spec, rhs_spec, out_spec = numbers
    convolution = canonical.LaxConvolution(
        window_strides=stride,
        padding=pairs,
        lhs_dilation=lhs_dilation,
        rhs_dilation=dilation,
        lhs_spec=tuple(lhs_spec),
        rhs_spec=tuple(rhs_spec),
        out_spec=tuple(out_spec),
        feature_group_count=groups,
        batch_group_count=batch_groups,
        precision=arguments.precision(precision),
        algorithm=arguments.algorithms(algorithm),
    )
    out_dtype = arguments.result_dtype(lhs.dtype, preferred_element_type)
    out_shape = convolution.out_shape(lhs.shape, rhs.shape)
    transposed |= any(d > 1 for d in lhs_dilation) and all(s == 1 for s in stride)
    if 0 in (*lhs.shape, *rhs.shape, *out_shape):
        transposed = False  # dgrad's padding would be undefined, and the result is empty or zero
    op = Op.DGRAD if transposed else Op.FPROP
    form = canonical.form(convolution, op, lhs.shape, rhs.shape, out_shape)
    channels = out_spec[1]
    static, arrays = epilogue.checked(
        *terms,
        operand_dtype=lhs.dtype,
        channels=out_shape[channels],
        out_shape=out_shape,
        out_dtype=out_dtype,
    )
    compute = functools.partial(form.apply, filter_reversed=filter_reversed)
    if static.plain:
        return compute(lhs, rhs, out_dtype)
    acc = epilogue.sums(compute, lhs, rhs, out_dtype)
    return epilogue.finish(acc, arrays, channels, static, out_dtype)[0]
