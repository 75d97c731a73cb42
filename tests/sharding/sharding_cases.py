"""Random sharded programs: each a function of (seed, index), with the results by definition.

A case is a program of one convolution, the mesh, and the split of every operand. Operands are small
integers, for which every order of summation gives the same bits, so NumPy gives the expected
results for every split.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_calls import Call, draw_numbers, in_order
from fuzz_problems import Draw
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from numerics import EXACT_LIMIT, reference
from problems import Problem, xla_aborts

import jaxconv
from jaxconv._src.problem.spec import Op

FORMS = ("conv", "override", "fused", "statistics", "int8", "quantised")
MESHES = ((2,), (3,), (4,), (8,), (2, 2), (2, 4), (4, 2), (2, 3), (3, 2), (2, 2, 2))
DEVICES = max(math.prod(shape) for shape in MESHES)
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

Specs = dict[str, tuple[tuple[str, ...], ...]]  # operand -> mesh axes of every array axis


@dataclasses.dataclass
class Case:
    """One sharded program.

    Attributes:
        form: one of ``FORMS``.
        call: the convolution.
        wanted: the program's results: y, dx, dw; with statistics y, mean, variance.
        kinds: "auto", "explicit" or "manual" for each mesh axis.
        order: the order of the devices in the mesh.
        specs: the split of every operand.
        terms: the epilogue's words.
        inside: whether ``fuse`` is applied to the function that is differentiated.
    """

    seed: int
    index: int
    form: str
    call: Call
    wanted: tuple[str, ...]
    shape: tuple[int, ...]
    kinds: tuple[str, ...]
    order: tuple[int, ...]
    specs: Specs
    terms: tuple[str, ...] = ()
    inside: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple("abc"[: len(self.shape)])

    @property
    def manual(self) -> tuple[str, ...]:
        return tuple(n for n, k in zip(self.names, self.kinds, strict=True) if k == "manual")

    @property
    def explicit(self) -> bool:
        return "explicit" in self.kinds

    def mesh(self) -> Mesh:
        devices = np.array(jax.devices("cpu"))[list(self.order)].reshape(self.shape)
        types = [AxisType.Explicit if k == "explicit" else AxisType.Auto for k in self.kinds]
        return Mesh(devices, self.names, tuple(types))

    def canonical(self, name: str, result: np.ndarray) -> np.ndarray:
        """A result with its axes in the definition's order."""
        roles = {"y": "y", "dx": "x", "dw": "w"}
        return self.call.to_canonical(roles[name], result) if name in roles else result

    def line(self) -> str:
        axes = ", ".join(
            f"{n}={size} {kind}"
            for n, size, kind in zip(self.names, self.shape, self.kinds, strict=True)
        )
        split = ", ".join(f"{name} {spec_text(spec)}" for name, spec in self.specs.items())
        form = " ".join((self.form, *self.terms, *(["inside"] if self.inside else [])))
        return (
            f"--seed {self.seed} --problem {self.index}: {form}, {' '.join(self.wanted)}; "
            f"mesh {axes}; {split}; {self.call.line().partition(': ')[2]}"
        )


def spec_text(spec) -> str:
    return "(" + ", ".join("+".join(axes) or "-" for axes in spec) + ")"


def partition_spec(spec) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in spec))


# --- drawing --------------------------------------------------------------------------------------


def _extent(draw: Draw, *usual: int) -> int:
    return draw.one_of(*usual) if draw.chance(0.8) else draw.integer(1, 9)


def _draw_problem(draw: Draw, name: str, form: str) -> tuple[Problem, int]:
    """A convolution whose extents are often divisible, and its batch groups."""
    while True:
        rank = draw.one_of(1, 2, 2, 2, 2, 3)
        spatial = tuple(
            _extent(draw, *((8, 12, 16, 24) if rank == 1 else (4, 6, 8, 12) if rank == 2 else (4,)))
            for _ in range(rank)
        )
        window = tuple(draw.one_of(1, 2, 3, 3, 3, 5 if rank < 3 else 2) for _ in range(rank))
        n, c, k = _extent(draw, 1, 2, 4, 8), _extent(draw, 2, 4, 8), _extent(draw, 2, 4, 8)
        if form == "quantised":
            k = draw.one_of(8, 32, 64, 128, 256)  # blocks of 32 are not split
        groups, batch_groups = draw.one_of(1, 1, 1, 1, 2, 4, 8), 1
        if form == "quantised":  # groups have 32 channels each, or one
            groups = 1
        if groups > 1 and form not in ("fused", "statistics", "quantised") and draw.chance(0.2):
            groups, batch_groups = 1, 2
        if groups > 1 and draw.chance(0.5):  # depthwise
            c, k = 1, draw.one_of(1, 1, 2)
        stride = tuple(draw.one_of(1, 2, 2, 3) for _ in range(rank))
        if draw.chance(0.5):
            stride = (1,) * rank
        ones = (1,) * rank
        lhs_dilation = draw.integers(1, 2, rank) if draw.chance(0.2) else ones
        dilation = draw.integers(1, 2, rank) if draw.chance(0.3) else ones
        if form in ("statistics", "quantised"):
            lhs_dilation = ones
        reach = [(w - 1) * d for w, d in zip(window, dilation, strict=True)]
        if draw.chance(0.6):
            padding = tuple((r // 2, r - r // 2) for r in reach)
        else:
            low = -1 if draw.chance(0.3) else 0
            padding = tuple((draw.integer(low, r + 1), draw.integer(low, r + 1)) for r in reach)
        problem = Problem(
            name=name,
            spatial=spatial,
            window=window,
            n=n,
            c=groups * c,
            k=groups * k,
            stride=stride,
            padding=padding,
            lhs_dilation=lhs_dilation,
            dilation=dilation,
            groups=groups,
            batch=None if batch_groups == 1 else batch_groups,
        )
        if all(problem.out_spatial) and not xla_aborts(problem):
            return problem, batch_groups


def _draw_call(draw: Draw, seed: int, index: int, form: str) -> Call:
    problem, batch_groups = _draw_problem(draw, f"{seed}-{index}", form)
    rank, groups = problem.rank, problem.groups
    channels_last = (0, rank + 1, *range(1, rank + 1))
    numbers = lax.ConvDimensionNumbers(channels_last, (rank + 1, rank, *range(rank)), channels_last)
    if form not in ("statistics", "quantised") and draw.chance(0.7):
        _, numbers = draw_numbers(draw, rank)
    parameters = {
        "window_strides": problem.stride,
        "padding": problem.padding,
        "lhs_dilation": problem.lhs_dilation,
        "rhs_dilation": problem.dilation,
        "dimension_numbers": numbers,
        "feature_group_count": groups,
        "batch_group_count": batch_groups,
    }
    dtype = np.dtype(draw.one_of(*(np.float32,) * 4, jnp.bfloat16, np.float16))
    if form in ("int8", "quantised"):
        dtype = np.dtype(np.int8)
        parameters["preferred_element_type"] = np.int32
    if form == "statistics":
        dtype = np.dtype(np.float32)
    return Call(
        seed=seed,
        index=index,
        dtype=dtype,
        parameters=parameters,
        problem=problem,
        numbers=numbers,
        whole=True,
    )


def _holds(axes: Sequence[str], extent: int, sizes: dict[str, int]) -> bool:
    return extent % math.prod(sizes[axis] for axis in axes) == 0


def _draw_spec(draw: Draw, shape: Sequence[int], sizes: dict[str, int], first=()) -> list:
    """Puts mesh axes on random array axes that they divide; ``first`` is already on axis 0."""
    spec: list[tuple[str, ...]] = [()] * len(shape)
    if first:
        spec[0] = tuple(first)
    for i in draw.permutation(len(sizes)):
        name = tuple(sizes)[i]
        if name in first or not shape or draw.chance(0.3):
            continue
        at = draw.integer(0, len(shape) - 1)
        axes = (*spec[at], name)
        if _holds(axes, shape[at], sizes):
            spec[at] = axes
    return spec


def _draw_specs(draw: Draw, case: Case, shapes: dict[str, tuple[int, ...]]) -> Specs:
    """Splits all operands by one split of the convolution's dimensions, or each at random."""
    sizes = dict(zip(case.names, case.shape, strict=True))
    if draw.chance(0.35):
        return {name: tuple(_draw_spec(draw, s, sizes)) for name, s in shapes.items()}
    dims = _dimensions(case.call)
    spatial = [f"s{i}" for i in range(case.call.problem.rank)]
    split: dict[str, tuple[str, ...]] = {}
    for i in draw.permutation(len(sizes)):
        if draw.chance(0.85):
            dim = draw.one_of("n", "c", "k", *spatial, *spatial)
            split[dim] = (*split.get(dim, ()), case.names[i])
    specs: Specs = {}
    for name, shape in shapes.items():
        specs[name] = tuple(
            axes if _holds(axes := split.get(dim, ()), extent, sizes) else ()
            for dim, extent in zip(dims[name], shape, strict=True)
        )
    if draw.chance(0.3):  # splits one operand differently
        name = draw.one_of(*shapes)
        specs[name] = tuple(_draw_spec(draw, shapes[name], sizes))
    return specs


def _dimensions(call: Call) -> dict[str, tuple[str, ...]]:
    """The dimension of each axis of each operand. The filter's window has dimensions of its own."""
    rank = call.problem.rank
    spatial, window = [f"s{i}" for i in range(rank)], [f"r{i}" for i in range(rank)]
    found = {
        "x": in_order(call.numbers.lhs_spec, ("n", "c", *spatial)),
        "w": in_order(call.numbers.rhs_spec, ("k", "c", *window)),
        "t": in_order(call.numbers.out_spec, ("n", "k", *spatial)),
        "scale": ("k",),
        "bias": ("k",),
    }
    return found | {"residual": found["t"]}


def draw_case(seed: int, index: int) -> Case:
    """The case of (seed, index)."""
    draw = Draw(seed, index, 14)
    form = draw.one_of("conv", "conv", "override", "override", "fused", "fused", *FORMS[3:])
    call = _draw_call(draw, seed, index, form)
    shape = draw.one_of(*MESHES)
    kind = draw.one_of("auto", "auto", "explicit", "explicit", "mixed")
    kinds = tuple(draw.one_of("auto", "explicit") if kind == "mixed" else kind for _ in shape)
    order = tuple(range(math.prod(shape)))
    if draw.chance(0.15):
        order = draw.permutation(len(order))
    wanted, terms = ("y",), ()
    if form in ("conv", "override", "fused"):
        wanted = draw.one_of(("y",), ("dx",), ("dw",), ("y", "dx", "dw"))
    if form == "fused":
        terms = tuple(t for t in ("scale", "bias", "residual") if draw.chance(0.5))
        terms = (*terms, draw.one_of("relu", "leaky_relu"))
    if form == "quantised":
        terms = ("scale", *(t for t in ("bias", "residual") if draw.chance(0.5)), "relu")
    if form == "statistics":
        wanted = ("y", "mean", "variance")
        terms = ("bias",) if draw.chance(0.3) else ()
    case = Case(seed, index, form, call, wanted, shape, kinds, order, {}, terms)
    case.inside = draw.chance(0.5)
    out_shape = call.array_shape("y")
    channels = (out_shape[call.numbers.out_spec[1]],)
    shapes = {"x": call.lhs_shape, "w": call.rhs_shape, "t": out_shape}
    if not {"dx", "dw"} & set(wanted):
        del shapes["t"]
    shapes |= {term: channels for term in terms if term in ("scale", "bias")}
    shapes |= {term: out_shape for term in terms if term == "residual"}
    case.specs = _draw_specs(draw, case, shapes)
    if form == "quantised":
        _keep_blocks(case, shapes)
    _draw_manual(draw, case, shapes)
    return case


def _keep_blocks(case: Case, shapes: dict[str, tuple[int, ...]]) -> None:
    """Leaves input channels whole, and splits output channels in the kernels' blocks of 32."""
    sizes = dict(zip(case.names, case.shape, strict=True))

    def kept(axes: tuple[str, ...], dim: str, extent: int) -> tuple[str, ...]:
        whole = dim[0] in "cr" or (dim == "k" and not _holds(axes, extent // 32, sizes))
        return () if whole or (dim == "k" and extent < 64) else axes

    for name, spec in case.specs.items():
        along = zip(spec, _dimensions(case.call)[name], shapes[name], strict=True)
        case.specs[name] = tuple(kept(*each) for each in along)


def _draw_manual(draw: Draw, case: Case, shapes) -> None:
    """Makes one mesh axis manual, which splits images: the program becomes a ``shard_map``."""
    n = case.call.problem.n
    at = {"x": case.call.numbers.lhs_spec[0], "t": case.call.numbers.out_spec[0]}
    at["residual"] = at["t"]
    i = draw.integer(0, len(case.shape) - 1)
    name, sizes = case.names[i], dict(zip(case.names, case.shape, strict=True))
    plain = case.call.problem.batch is None and case.form in ("conv", "override", "fused")
    if not plain or n % sizes[name] or not draw.chance(0.25):
        return
    # XLA:CPU aborts on a 16-bit sum over manual axes that JAX inserts.
    if case.call.dtype != np.float32:
        return
    case.kinds = (*case.kinds[:i], "manual", *case.kinds[i + 1 :])
    for operand, spec in case.specs.items():
        axes = [tuple(a for a in each if a != name) for each in spec]
        if operand in at:
            images = (name, *axes[at[operand]])
            axes[at[operand]] = images if _holds(images, n, sizes) else (name,)
        case.specs[operand] = tuple(axes)


def uneven(case: Case) -> bool:
    """Whether rows are split into unequal shares, or shares narrower than the window.

    XLA rounds unequal shares up. Narrow shares are gathered.
    """
    sizes, p = dict(zip(case.names, case.shape, strict=True)), case.call.problem
    reach = [(w - 1) * d for w, d in zip(p.window, p.dilation, strict=True)]

    def fits(axes, i) -> bool:
        parts = math.prod(sizes[axis] for axis in axes)
        extents = p.spatial[i] * p.lhs_dilation[i], p.out_spatial[i] * p.stride[i]
        whole = p.spatial[i] % parts == p.out_spatial[i] % parts == 0
        return parts == 1 or (whole and min(extents) // parts >= reach[i])

    dims, specs = _dimensions(case.call), case.specs
    return any(
        dim == f"s{i}" and not fits(axes, i)
        for name, spec in specs.items()
        for axes, dim in zip(spec, dims[name], strict=True)
        for i in range(p.rank)
    )


def conflicting(case: Case) -> bool:
    """Whether one mesh axis splits two dimensions of the convolution."""
    dims: dict[str, set[str]] = {}
    for name, spec in case.specs.items():
        for axes, dim in zip(spec, _dimensions(case.call)[name], strict=True):
            for axis in axes:
                dims.setdefault(axis, set()).add(dim)
    return any(len(each) > 1 for each in dims.values())


def disputed(case: Case) -> bool:
    """Whether operands split a dimension differently, or x and the cotangent other positions."""
    split: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, spec in case.specs.items():
        along = zip(_dimensions(case.call)[name], spec, strict=True)
        split[name] = {dim: axes for dim, axes in along if axes}
    of_dims: dict[str, set[tuple[str, ...]]] = {}
    for dim, axes in (each for found in split.values() for each in found.items()):
        of_dims.setdefault(dim, set()).add(axes)
    rows = [{dim for dim in split.get(name, ()) if dim[0] == "s"} for name in "xt"]
    return any(len(each) > 1 for each in of_dims.values()) or (all(rows) and rows[0] != rows[1])


# --- operands and the definition ------------------------------------------------------------------


def _activation(word: str, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The value and the derivative of JAX's function."""
    if word == "relu":
        return np.maximum(u, 0), (u > 0).astype(u.dtype)
    if word == "leaky_relu":
        return np.where(u >= 0, u, 0.5 * u), np.where(u >= 0, 1.0, 0.5)
    return u, np.ones_like(u)


def _defined(case: Case, arrays: dict[str, np.ndarray], magnitudes: bool = False) -> dict:
    """All results in float64, canonical: y, and with a cotangent dx and dw.

    With ``magnitudes``, results for the operands' magnitudes, which bound every partial sum.
    """
    call, p = case.call, case.call.problem
    given = {name: np.abs(a) if magnitudes else a for name, a in arrays.items()}
    x, w = (call.to_canonical(role, given[role]) for role in "xw")
    acc = reference(Op.FPROP, p, x, w)
    scale = given.get("scale", np.ones(1))
    u = acc * scale + given.get("bias", np.zeros(1))
    if "residual" in given:
        u = u + call.to_canonical("y", given["residual"])
    word = case.terms[-1] if case.terms else ""
    y, slope = _activation(word, u)
    found = {"y": y}
    if "t" in given:
        t = call.to_canonical("y", given["t"]) * scale
        t = t if magnitudes else t * slope
        found["dx"] = reference(Op.DGRAD, p, t, w)
        found["dw"] = reference(Op.WGRAD, p, x, t)
    return found


def draw_arrays(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(operands in the call's axis order, expected results, canonical)."""
    call, rng = case.call, case.call.rng
    channels = call.array_shape("y")[call.numbers.out_spec[1]]
    shapes = {
        "x": call.lhs_shape,
        "w": call.rhs_shape,
        "t": call.array_shape("y"),
        "scale": (channels,),
        "bias": (channels,),
        "residual": call.array_shape("y"),
    }
    if case.form == "quantised":
        return _draw_quantised(case, {name: shapes[name] for name in case.specs})
    whole = call.dtype == np.int8
    largest = 127 if whole else 3 if call.dtype == np.float32 else 1
    density, limit = 1.0, EXACT_LIMIT["s8" if whole else DTYPES[call.dtype.name]]
    while True:
        arrays = {
            name: rng.integers(-largest, largest, shapes[name], endpoint=True)
            * (rng.random(shapes[name]) < density)
            for name in case.specs
        }
        arrays = {name: a.astype(np.float64) for name, a in arrays.items()}
        # The activation's slope of one half needs one more bit.
        bounds = _defined(case, arrays, magnitudes=True)
        if all(2 * bound.max(initial=0) <= limit for bound in bounds.values()):
            break
        density /= 2
    expected = _defined(case, arrays)
    if case.form == "statistics":
        over = tuple(range(expected["y"].ndim - 1))
        expected |= {"mean": expected["y"].mean(over), "variance": expected["y"].var(over)}
    wide = np.float32 if call.dtype == np.float32 else call.dtype
    return {name: a.astype(wide) for name, a in arrays.items()}, expected


def _draw_quantised(case: Case, shapes: dict[str, tuple[int, ...]]):
    """``draw_arrays`` for 8 bits; scales are powers of two, so that t is exact."""
    rng, p = case.call.rng, case.call.problem
    arrays = {n: rng.integers(-128, 127, s, np.int8, endpoint=True) for n, s in shapes.items()}
    terms = p.c // p.groups * math.prod(p.window)
    exponents = rng.integers(-2, 3, shapes["scale"]) - round(math.log2(64 * math.sqrt(terms)))
    arrays["scale"] = np.exp2(exponents).astype(np.float32)
    if "bias" in shapes:
        arrays["bias"] = rng.integers(-9, 9, shapes["bias"]).astype(np.float32)
    sums = reference(Op.FPROP, p, *(case.call.to_canonical(r, arrays[r]) for r in "xw"))
    t = sums * arrays["scale"] + arrays.get("bias", 0)
    if "residual" in arrays:
        t = t + case.call.to_canonical("y", arrays["residual"])
    return arrays, {"y": np.clip(np.rint(np.maximum(t, 0)), -128, 127)}


# --- programs -------------------------------------------------------------------------------------


def program(case: Case, ours: bool) -> Callable:
    """operands by name -> the wanted results, by jaxconv in the case's form or by lax only."""
    call = case.call
    if case.form == "statistics" and ours:
        p = call.problem

        def with_statistics(x, w, bias=None):
            y, mean, variance = jaxconv.conv(
                x,
                w,
                stride=p.stride,
                padding=p.padding,
                dilation=p.dilation,
                groups=p.groups,
                bias=bias,
                statistics=True,
            )
            return {"y": y, "mean": mean, "variance": variance}

        return with_statistics
    if case.form == "quantised":
        return _quantised(call, ours)
    alone = ours and case.form == "conv"
    convolve = jaxconv.conv_general_dilated if alone else lax.conv_general_dilated
    within = ours and case.form == "fused" and case.inside

    def forward(x, w, scale=None, bias=None, residual=None):
        y = convolve(x, w, **call.parameters)
        along = [1] * y.ndim
        along[call.numbers.out_spec[1]] = -1
        y = y if scale is None else y * scale.reshape(along)
        y = y if bias is None else y + bias.reshape(along)
        y = y if residual is None else y + residual
        if "relu" in case.terms:
            return jax.nn.relu(y)
        if "leaky_relu" in case.terms:
            return jax.nn.leaky_relu(y, 0.5)
        return y

    def step(x, w, t=None, **terms):
        f = jaxconv.fuse(forward) if within else forward
        if t is None:
            y = f(x, w, **terms)
            over = tuple(range(y.ndim - 1))
            found = {"y": y, "mean": y.mean(over), "variance": y.var(over)}
        else:
            y, pull = jax.vjp(lambda x, w: f(x, w, **terms), x, w)
            if case.explicit:  # a cotangent has the type of its primal
                t = jax.sharding.reshard(t, jax.typeof(y).sharding)
            dx, dw = pull(t)
            found = {"y": y, "dx": dx, "dw": dw}
        return {name: found[name] for name in case.wanted}

    if not ours or case.form == "conv":
        return step
    # ``override`` also covers the convolutions that ``fuse`` leaves to lax.
    return jaxconv.override(jaxconv.fuse(step) if case.form == "fused" and not within else step)


def _quantised(call: Call, ours: bool) -> Callable:
    """A quantised layer, by ``jaxconv.int8.conv`` or by lax's integer convolution."""
    p = call.problem

    def by_lax(x, w, scale, bias=0.0, residual=0):
        y = lax.conv_general_dilated(x, w, **call.parameters).astype(np.float32)
        t = jax.nn.relu(y * scale + bias + jnp.asarray(residual, np.float32))
        return {"y": jnp.clip(jnp.round(t), -128, 127).astype(np.int8)}

    def layer(x, w, scale, bias=None, residual=None):
        window = dict(stride=p.stride, padding=p.padding, dilation=p.dilation)
        return {"y": jaxconv.int8.conv(x, w, scale, bias, residual, activation="relu", **window)}

    return layer if ours else by_lax


def mapped(case: Case, function: Callable, mesh: Mesh) -> Callable:
    """The function, inside a ``shard_map`` over the manual axes if there are any."""
    names = tuple(case.specs)

    def positional(*operands):
        return function(**dict(zip(names, operands, strict=True)))

    if not case.manual:
        return positional
    (manual,) = case.manual

    def outer(spec):
        return PartitionSpec(*(manual if manual in axes else None for axes in spec))

    images = {"y": case.call.numbers.out_spec[0], "dx": case.call.numbers.lhs_spec[0]}
    out = {
        name: PartitionSpec(*(None,) * images[name], manual) if name in images else PartitionSpec()
        for name in case.wanted
    }
    specs = tuple(outer(case.specs[name]) for name in names)
    return jax.shard_map(positional, mesh=mesh, in_specs=specs, out_specs=out, axis_names={manual})


def placed(case: Case, arrays: dict[str, np.ndarray], mesh: Mesh) -> list[jax.Array]:
    return [
        jax.device_put(arrays[name], NamedSharding(mesh, partition_spec(spec)))
        for name, spec in case.specs.items()
    ]
