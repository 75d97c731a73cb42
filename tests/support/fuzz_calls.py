"""Random calls of ``conv_general_dilated``: each a function of (seed, index)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from fuzz_problems import CALLS, Draw, draw_problem, with_long_sums
from jax import lax
from problems import Problem, xla_aborts


@dataclasses.dataclass
class Call:
    """One call of ``conv_general_dilated``: its arguments, and the equivalent ``Problem``."""

    seed: int
    index: int
    dtype: np.dtype
    parameters: dict
    problem: Problem  # the same convolution in canonical sizes; batch groups are its batch
    numbers: lax.ConvDimensionNumbers
    whole: bool  # small integers, on which every order of summation gives the same bits
    broken: str = ""  # the reason why the call is invalid
    lhs_shape: tuple[int, ...] = dataclasses.field(init=False)
    rhs_shape: tuple[int, ...] = dataclasses.field(init=False)

    def __post_init__(self):
        p, batch_groups = self.problem, self.problem.batch or 1
        x, w = (batch_groups * p.n, p.c), (batch_groups * p.k, p.c // p.groups)
        self.lhs_shape = in_order(self.numbers.lhs_spec, (*x, *p.spatial))
        self.rhs_shape = in_order(self.numbers.rhs_spec, (*w, *p.window))

    @property
    def rng(self) -> np.random.Generator:
        """A generator for the data, separate from that of the parameters."""
        return np.random.default_rng([self.seed, self.index, 1])

    @property
    def result_dtype(self) -> np.dtype:
        preferred = self.parameters.get("preferred_element_type")
        return np.dtype(self.dtype if preferred is None else preferred)

    def line(self) -> str:
        """The repro: the command to run, and the call itself."""
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
        return in_order(self.numbers.out_spec, (p.n, groups * p.k, *p.out_spatial))

    def to_canonical(self, role: str, array: np.ndarray) -> np.ndarray:
        """The array with its axes in ``Problem``'s order; batch groups become a separate axis."""
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


def in_order(spec: tuple[int, ...], values: tuple) -> tuple:
    """Reorders values from (batch or output, feature or input, *spatial) to the array's axes."""
    found = [None] * len(values)
    for axis, value in zip(spec, values, strict=True):
        found[axis] = value
    return tuple(found)


def _same_padding(extent: int, window: int, stride: int, dilation: int, lower: bool):
    """The padding with which ceil(extent / stride) windows fit; if ``lower``, an odd one first."""
    reach = (window - 1) * dilation + 1 if window else 0
    total = max(0, (-(-extent // stride) - 1) * stride + reach - extent)
    half, rest = divmod(total, 2)
    return (half + rest, half) if lower else (half, half + rest)


def _draw_padding(draw: Draw, p: Problem):
    """(the parameter, the equivalent pairs)."""
    if set(p.lhs_dilation) <= {1} and draw.chance(0.5):
        name = draw.one_of("SAME", "SAME_LOWER", "VALID")
        pairs = ((0, 0),) * p.rank
        if name != "VALID":
            pairs = tuple(
                _same_padding(*axis, name == "SAME_LOWER")
                for axis in zip(p.spatial, p.window, p.stride, p.dilation, strict=True)
            )
        return (name.lower() if draw.chance(0.1) else name), pairs
    return draw.sequence(tuple(draw.sequence(pair) for pair in p.padding)), p.padding


def _crops_too_much(p: Problem) -> bool:
    """Whether lax refuses the padding as too negative; only ``_break`` makes such calls."""
    axes = zip(p.spatial, p.lhs_dilation, p.padding, strict=True)
    return any((e - 1) * d + 1 + lo + hi < 0 if e else lo + hi < 0 for e, d, (lo, hi) in axes)


def _emptied(draw: Draw, p: Problem) -> Problem:
    """The problem, usually with one extent of zero."""
    sizes = [p.n, p.c, p.k, *p.spatial, *p.window]
    if draw.chance(0.7):
        sizes[draw.integer(0, len(sizes) - 1)] = 0
    n, c, k, *rest = sizes
    spatial, window = tuple(rest[: p.rank]), tuple(rest[p.rank :])
    return dataclasses.replace(p, n=n, c=c, k=k, spatial=spatial, window=window)


def draw_numbers(draw: Draw, rank: int):
    """(the parameter, the equivalent axes)."""
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
    # Letters name the axes. Strides and the like have the order of the filter's letters.
    output, feature, *window = numbers.rhs_spec
    numbers = numbers._replace(rhs_spec=(output, feature, *sorted(window)))
    letters = draw.one_of("DHW"[3 - rank :], "XYZ"[:rank], "012"[:rank])
    strings = tuple(
        "".join(in_order(spec, (*outer, *letters)))
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
    """The call of (seed, index); lax refuses some of them."""
    draw = Draw(seed, index)
    dtype = np.dtype(
        draw.one_of(*(np.float32,) * 4, *(jnp.bfloat16,) * 3, *(np.float16,) * 2, *(np.int8,) * 2)
    )
    may_be_empty = draw.chance(0.06)
    long = dtype == np.int8 and draw.chance(0.3)
    while True:
        drawn = draw_problem(draw, f"{seed}-{index}", CALLS)
        if long and drawn.rank:
            drawn = with_long_sums(draw, drawn)
        if may_be_empty:
            drawn = _emptied(draw, drawn)
        padding, pairs = _draw_padding(draw, drawn)
        # Dilation leaves an extent of 0 at 0, but Problem computes (extent - 1) * dilation + 1:
        # such extents count as undilated.
        undilated = {
            name: tuple(d if e else 1 for d, e in zip(dilations, extents, strict=True))
            for name, dilations, extents in (
                ("lhs_dilation", drawn.lhs_dilation, drawn.spatial),
                ("dilation", drawn.dilation, drawn.window),
            )
        }
        problem = dataclasses.replace(drawn, padding=pairs, **undilated)
        valid = not xla_aborts(problem) and not _crops_too_much(problem)
        if valid and (may_be_empty or all(problem.out_spatial)):
            break
    rank, groups, batch_groups = problem.rank, problem.groups, problem.batch or 1
    stride, lhs_dilation, dilation = problem.stride, drawn.lhs_dilation, drawn.dilation
    dimension_numbers, numbers = draw_numbers(draw, rank)
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
        parameters=parameters,
        problem=problem,
        numbers=numbers,
        whole=dtype == np.int8 or draw.chance(0.5),
    )
    if draw.chance(0.05):
        _break(call, draw)
    return call


def _break(call: Call, draw: Draw) -> None:
    """Makes one parameter invalid for lax, but not by a form that only this library accepts."""
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
