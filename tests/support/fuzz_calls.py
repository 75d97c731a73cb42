"""Random calls of ``conv_general_dilated``: each a function of (seed, index)."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from numerics import LONG_SUM
from problems import Problem, xla_aborts


@dataclasses.dataclass
class Call:
    """One call of ``conv_general_dilated``, in its own terms and as a ``Problem``."""

    seed: int
    index: int
    dtype: np.dtype
    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    parameters: dict
    problem: Problem  # the same convolution in canonical sizes; batch groups are its batch
    numbers: lax.ConvDimensionNumbers
    whole: bool  # small integers, on which every order of summation gives the same bits
    broken: str = ""  # what makes the call invalid

    @property
    def rng(self) -> np.random.Generator:
        """For the data, apart from the generator that the parameters came from."""
        return np.random.default_rng([self.seed, self.index, 1])

    @property
    def result_dtype(self) -> np.dtype:
        preferred = self.parameters.get("preferred_element_type")
        return np.dtype(self.dtype if preferred is None else preferred)

    def line(self) -> str:
        """The repro: what to run, and the call itself."""
        parameters = "".join(f", {name}={value}" for name, value in self.parameters.items())
        data = "integers" if self.whole else "normal"
        return (
            f"--seed {self.seed} --problem {self.index} ({data}): conv_general_dilated("
            f"{self.dtype.name}{list(self.lhs_shape)}, {self.dtype.name}{list(self.rhs_shape)}"
            f"{parameters})"
        )

    def array_shape(self, role: str) -> tuple[int, ...]:
        """Shape in the call's axis order."""
        if role == "x":
            return self.lhs_shape
        if role == "w":
            return self.rhs_shape
        p = self.problem
        groups = p.batch or 1
        return _in_order(self.numbers.out_spec, (p.n, groups * p.k, *p.out_spatial))

    def to_canonical(self, role: str, array: np.ndarray) -> np.ndarray:
        """The array with its axes in ``Problem``'s order, batch groups on an axis of their own."""
        spec = {
            "x": self.numbers.lhs_spec,
            "w": self.numbers.rhs_spec,
            "y": self.numbers.out_spec,
        }[role]
        outer, feature, *spatial = spec
        if role == "w":  # written (output, input, *spatial)
            outer, feature = feature, outer
            array = np.transpose(array, (*spatial, outer, feature))
            split = array.ndim - 1
        else:
            array = np.transpose(array, (outer, *spatial, feature))
            split = 0 if role == "x" else array.ndim - 1
        groups = self.problem.batch
        if groups is None:
            return array
        shape = list(array.shape)
        shape[split : split + 1] = [groups, shape[split] // groups]
        return np.moveaxis(array.reshape(shape), split, 0)


def _in_order(spec: tuple[int, ...], extents: tuple[int, ...]) -> tuple[int, ...]:
    """Extents given as (batch or output, feature or input, *spatial), in the array's order."""
    shape = [0] * len(extents)
    for axis, extent in zip(spec, extents, strict=True):
        shape[axis] = extent
    return tuple(shape)


class Draw:
    """A generator of the plain Python values that parameters are made of."""

    def __init__(self, *seed: int):
        self.rng = np.random.default_rng(seed)

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def one_of(self, *values):
        return values[int(self.rng.integers(len(values)))]

    def integer(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high, endpoint=True))

    def integers(self, low: int, high: int, size: int) -> tuple[int, ...]:
        return tuple(self.integer(low, high) for _ in range(size))

    def sequence(self, values: tuple) -> tuple | list:
        return self.one_of(tuple, list)(values)

    def permutation(self, size: int) -> tuple[int, ...]:
        return tuple(int(i) for i in self.rng.permutation(size))


def _same_padding(extent: int, window: int, stride: int, dilation: int, lower: bool):
    """The padding with which ceil(extent / stride) windows fit; the odd one goes to one side."""
    reach = (window - 1) * dilation + 1 if window else 0
    total = max(0, (-(-extent // stride) - 1) * stride + reach - extent)
    half, rest = divmod(total, 2)
    return (half + rest, half) if lower else (half, half + rest)


def _draw_padding(draw: Draw, spatial, window, stride, lhs_dilation, dilation):
    """(the parameter, the pairs it stands for)."""
    rank = len(spatial)
    if set(lhs_dilation) <= {1} and draw.chance(0.5):
        name = draw.one_of("SAME", "SAME_LOWER", "VALID")
        pairs = ((0, 0),) * rank
        if name != "VALID":
            pairs = tuple(
                _same_padding(*axis, name == "SAME_LOWER")
                for axis in zip(spatial, window, stride, dilation, strict=True)
            )
        return (name.lower() if draw.chance(0.1) else name), pairs
    least, wide = -2 if draw.chance(0.4) else 0, draw.chance(0.25)
    pairs = []
    for extent, w, ld, d in zip(spatial, window, lhs_dilation, dilation, strict=True):
        most = max(0, (w - 1) * d) + (draw.integer(1, 8) if wide else draw.integer(0, 1))
        lo, hi = draw.integer(least, most), draw.integer(least, most)
        dilated = (extent - 1) * ld + 1 if extent else 0
        while dilated + lo + hi < 0:  # lax refuses it; `_break` has such calls
            lo, hi = lo + 1, hi + 1
        pairs.append((lo, hi))
    return draw.sequence(tuple(draw.sequence(pair) for pair in pairs)), tuple(pairs)


def _draw_numbers(draw: Draw, rank: int):
    """(the parameter, the axes it stands for)."""
    common = lax.ConvDimensionNumbers(*(tuple(range(rank + 2)),) * 3)
    form = draw.one_of("none", "strings", "strings", "strings", "usual", "object")
    if form == "none":
        return None, common
    axes = [draw.permutation(rank + 2) for _ in range(3)]
    if form == "usual":  # channels last, where kernels need no transposition
        last = (0, rank + 1, *range(1, rank + 1))
        axes = [last, (rank + 1, rank, *range(rank)), last]
    numbers = lax.ConvDimensionNumbers(*axes)
    if form == "object":
        return numbers, numbers
    # Letters name the axes; strides and the like follow their order in the filter's string.
    output, feature, *window = numbers.rhs_spec
    numbers = numbers._replace(rhs_spec=(output, feature, *sorted(window)))
    letters = draw.one_of("DHW"[3 - rank :], "XYZ"[:rank], "012"[:rank])
    strings = tuple(
        "".join(_in_order(spec, (*outer, *letters)))
        for spec, outer in zip(numbers, ("NC", "OI", "NC"), strict=True)
    )
    return strings, numbers


def _draw_precision(draw: Draw):
    if draw.chance(0.6):
        return None
    names = ("default", "fastest", "high", "highest", "float32", "bfloat16", "tensorfloat32")
    levels = tuple(lax.Precision)
    return draw.one_of(
        draw.one_of(*names),
        draw.one_of(*levels),
        (draw.one_of(*names), draw.one_of(*names)),
        (draw.one_of(*levels), draw.one_of(*levels)),
    )


PREFERRED = {
    "float32": (np.float32,),
    "bfloat16": (np.float32, np.float32, jnp.bfloat16, np.float16),
    "float16": (np.float32, np.float32, np.float16, jnp.bfloat16),
    "int8": (np.int32, np.int32, np.int32, np.int32, np.int16, np.int8, np.float32),
}


def draw_call(seed: int, index: int) -> Call:
    """The call of conv_general_dilated with this number; some of them lax refuses."""
    draw = Draw(seed, index)
    rank = draw.one_of(0, *(1,) * 6, *(2,) * 8, *(3,) * 5)
    dtype = np.dtype(
        draw.one_of(*(np.float32,) * 4, *(jnp.bfloat16,) * 3, *(np.float16,) * 2, *(np.int8,) * 2)
    )
    largest, widest = {0: (1, 1), 1: (32, 7), 2: (10, 4), 3: (6, 3)}[rank]
    may_be_empty = draw.chance(0.06)
    long = dtype == np.int8 and draw.chance(0.3)
    while True:
        spatial, window = draw.integers(1, largest, rank), draw.integers(1, widest, rank)
        n, c, k = draw.integer(1, 4), draw.integer(1, 9), draw.integer(1, 9)
        if draw.chance(0.25):  # whole vectors of channels
            c, k = draw.one_of(4, 8, 16), draw.one_of(8, 16, 32)
        groups = draw.one_of(1, 1, 1, 2, 3, 8)
        batch_groups = 1
        if groups > 1 and draw.chance(0.4):  # depthwise, with 1 to 3 filters per channel
            c, k = 1, draw.integer(1, 3)
        elif groups > 1 and draw.chance(0.4):
            groups, batch_groups = 1, draw.integer(2, 3)
        elif groups > 1 and draw.chance(0.5):  # whole groups in a vector, with a tail
            c = k = draw.one_of(2, 4, 8)
            groups = draw.integer(2, 12)
        if long and rank:  # sums of extremes that float32 does not hold
            groups, batch_groups, k = min(groups, 2), min(batch_groups, 2), draw.integer(1, 9)
            c = LONG_SUM // max(1, math.prod(window)) + draw.integer(1, 40)
        stride = draw.integers(1, 3, rank) if draw.chance(0.5) else (1,) * rank
        lhs_dilation = draw.integers(1, 3, rank) if draw.chance(0.25) else (1,) * rank
        dilation = draw.integers(1, 3, rank) if draw.chance(0.4) else (1,) * rank
        if may_be_empty:
            which = draw.integer(0, 2 + 2 * rank)
            sizes = [n, c, k, *spatial, *window]
            if draw.chance(0.7):
                sizes[which] = 0
            n, c, k, *rest = sizes
            spatial, window = tuple(rest[:rank]), tuple(rest[rank:])
        padding, pairs = _draw_padding(draw, spatial, window, stride, lhs_dilation, dilation)
        # Nothing dilated is nothing: extents of 0 count as undilated, where Problem has
        # (extent - 1) * dilation + 1.
        problem = Problem(
            name=f"{seed}-{index}",
            spatial=spatial,
            window=window,
            n=n,
            c=groups * c,
            k=groups * k,
            stride=stride,
            padding=pairs,
            lhs_dilation=tuple(d if e else 1 for d, e in zip(lhs_dilation, spatial, strict=True)),
            dilation=tuple(d if e else 1 for d, e in zip(dilation, window, strict=True)),
            groups=groups,
            batch=None if batch_groups == 1 else batch_groups,
        )
        if (may_be_empty or all(problem.out_spatial)) and not xla_aborts(problem):
            break
    dimension_numbers, numbers = _draw_numbers(draw, rank)
    parameters = {"window_strides": draw.sequence(stride), "padding": padding}
    optional = {
        "lhs_dilation": (draw.sequence(lhs_dilation), set(lhs_dilation) <= {1}),
        "rhs_dilation": (draw.sequence(dilation), set(dilation) <= {1}),
        "dimension_numbers": (dimension_numbers, dimension_numbers is None),
        "feature_group_count": (groups, groups == 1),
        "batch_group_count": (batch_groups, batch_groups == 1),
        "precision": (precision := _draw_precision(draw), precision is None),
    }
    for name, (value, is_default) in optional.items():
        if not is_default or draw.chance(0.2):
            parameters[name] = value
    if draw.chance(1.0 if long else 0.8 if dtype == np.int8 else 0.3):
        preferred = np.int32 if long else draw.one_of(*PREFERRED[dtype.name])
        parameters["preferred_element_type"] = draw.one_of(
            preferred, np.dtype(preferred), np.dtype(preferred).name
        )
    call = Call(
        seed=seed,
        index=index,
        dtype=dtype,
        lhs_shape=_in_order(numbers.lhs_spec, (batch_groups * n, groups * c, *spatial)),
        rhs_shape=_in_order(numbers.rhs_spec, (batch_groups * groups * k, c, *window)),
        parameters=parameters,
        problem=problem,
        numbers=numbers,
        whole=dtype == np.int8 or draw.chance(0.5),
    )
    if draw.chance(0.05):
        _break(call, draw)
    return call


def _break(call: Call, draw: Draw) -> None:
    """Makes one parameter wrong. Nothing here is an abbreviation that only this library takes."""
    p, rank = call.parameters, len(call.lhs_shape) - 2

    def resize(shape, axis, by):
        return (*shape[:axis], shape[axis] + by, *shape[axis + 1 :])

    def input_channels():
        call.rhs_shape = resize(call.rhs_shape, call.numbers.rhs_spec[1], 1)

    def groups():
        p["feature_group_count"] = draw.one_of(0, -1, 7, 11)

    def batch_groups():
        p["batch_group_count"] = draw.one_of(0, -1, 7, 11)

    def both_groups():
        p.update(feature_group_count=2, batch_group_count=2)

    def window_strides():
        p["window_strides"] = draw.one_of((0,) * rank, (-1,) * rank, (1,) * (rank + 1))

    def lhs_dilation():
        p["lhs_dilation"] = draw.one_of((0,) * rank, (1,) * (rank + 1))

    def rhs_dilation():
        p["rhs_dilation"] = draw.one_of((0,) * rank, (-1,) * rank, (1,) * (rank + 1))

    def padding():
        p["padding"] = draw.one_of("FULL", "", ((-40, -40),) * rank, ((0, 0),) * (rank + 1))

    def string_padding_of_a_dilated_input():
        p.update(padding=draw.one_of("SAME", "VALID"), lhs_dilation=(2,) * rank)

    def dimension_numbers():
        p["dimension_numbers"] = draw.one_of(
            ("NCQRST"[: rank + 2], "OIDHW"[: rank + 2], "NCDHW"[: rank + 2]),
            ("N" * (rank + 2), "OIDHW"[: rank + 2], "NCDHW"[: rank + 2]),
            ("NCDHWZ"[: rank + 3], "OIDHWZ"[: rank + 3], "NCDHWZ"[: rank + 3]),
            ("NCDHW"[: rank + 2], "OIDHW"[: rank + 2]),
        )

    def preferred_element_type():
        narrower = {"float32": jnp.bfloat16, "int8": np.uint32}
        p["preferred_element_type"] = narrower.get(call.dtype.name, np.int32)

    def precision():
        p["precision"] = draw.one_of("exact", ("high",), 3)

    def ranks():
        call.rhs_shape = (*call.rhs_shape, 1)

    kinds = [
        input_channels,
        groups,
        batch_groups,
        both_groups,
        dimension_numbers,
        preferred_element_type,
        precision,
        ranks,
    ]
    if rank:
        kinds += [
            window_strides,
            lhs_dilation,
            rhs_dilation,
            padding,
            string_padding_of_a_dilated_input,
        ]
    kind = draw.one_of(*kinds)
    kind()
    call.broken = kind.__name__
