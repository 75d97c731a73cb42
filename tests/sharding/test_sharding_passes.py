"""Passes over sharded arrays: values, collectives, and the calls of each device.

The devices are eight virtual CPU devices, which run JAX operations in place of calls.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from sharding_tools import AXES, GRID, collectives, grid
from training_programs import assert_close, batch_norm

import jaxconv
from jaxconv._src.fuse.fuse_activations import Written
from jaxconv._src.library import native
from jaxconv._src.passes import (
    activated_sums,
    masked_sums,
    max_pool_gradient,
    max_pooling,
    moments,
    normalise,
    normalise_add,
)
from jaxconv._src.passes.masked_sums import Sums
from jaxconv._src.passes.max_pooling import Pooling, Windows
from jaxconv._src.passes.normalise import Form
from jaxconv._src.passes.normalise_add import BlockEnd
from jaxconv._src.sharding import partition
from jaxconv._src.sharding.device_layout import Arrangement

SHAPE = (8, 8, 4, 64)
WINDOWS = Windows(SHAPE, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
KINDS = (AxisType.Auto, AxisType.Explicit)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a pass.

    Attributes:
        function: a function of the arrays.
        operands: their kinds: an array "y", a vector of channels "c", one for each example "n" or
            each pair of examples "h", bits "b", a pooled array "p", places "q".
        sums: the number of segments over whose positions the results are sums; 0 without sums.
        windows: whether windows read the spatial axes.
    """

    function: Callable
    operands: str
    sums: int = 0
    windows: bool = False


def of_sums(form: Sums, operands: str) -> Case:
    function = functools.partial(masked_sums.masked_sums, form=form)
    return Case(function, operands, form.segments)


def of_moments(segments: int) -> Case:
    return Case(functools.partial(moments.moments, segments=segments), "y", segments)


def of_silu(**changes) -> Form:
    vectors = ("mean", "scale", "offset")
    operand = jax.core.ShapedArray(SHAPE, jnp.bfloat16)
    silu = Written(jax.nn.silu, operand, "silu", named=("silu", 0.0))
    return Form((vectors,), False, silu, np.dtype(jnp.bfloat16), **changes)


def of_activated(segments: int, operands: str, derivatives: bool = False) -> Case:
    function = functools.partial(
        activated_sums.activated_sums, form=of_silu(), segments=segments, derivatives=derivatives
    )
    return Case(function, operands, segments)


def of_pooling(kinds: str, **options) -> Case:
    form = Pooling(WINDOWS, len(kinds) > 1, **options)
    return Case(functools.partial(max_pooling.max_pool, form=form), kinds, windows=True)


def of_gradient(gradients: int, normalised: str) -> Case:
    def function(*operands):
        given = operands[:gradients], *operands[gradients:]
        return max_pool_gradient.max_pool_gradient(*given, windows=WINDOWS)

    return Case(function, "p" * gradients + "q" + normalised, windows=True)


CASES = {
    "sums": of_sums(Sums(1, 0, "none", False, None, None), "y"),
    "sums by the result, stored": of_sums(Sums(2, 1, "result", True, 0.0, None), "yyycy"),
    "sums by bits": of_sums(Sums(1, 2, "bits", True, 0.0, None), "yyyccb"),
    "sums by silu": of_sums(Sums(1, 1, "affine", False, None, None, "silu"), "yyccc"),
    "sums of examples": of_sums(Sums(1, 1, "affine", True, 0.0, None, None, 0.0, 8), "yynnn"),
    "sums of pairs": of_sums(Sums(1, 1, "none", False, None, None, segments=4), "yyh"),
    "sums of a gate": of_sums(
        Sums(1, 1, "affine", False, None, None, "silu", segments=8, values=True), "yyccc"
    ),
    "moments": of_moments(1),
    "moments of examples": of_moments(8),
    "moments of pairs": of_moments(4),
    "sums of silu": of_activated(1, "yccc"),
    "sums of silu, of examples": of_activated(8, "ynnn", derivatives=True),
    "normalised": Case(functools.partial(normalise.normalise, form=of_silu(stored=True)), "yccc"),
    "normalised, of examples": Case(
        functools.partial(normalise.normalise, form=of_silu(stored=True, copies=2)), "ynnn"
    ),
    "block's end": Case(
        functools.partial(normalise_add.normalise_add, form=BlockEnd(1, None)), "yyccc"
    ),
    "block's end, two arrays": Case(
        functools.partial(normalise_add.normalise_add, form=BlockEnd(2, 6.0)), "yycccccc"
    ),
    "pooling": of_pooling("y", places=True, operands=False),
    "pooling, affine": of_pooling("yccc", places=True, operands=True, copies=2),
    "pooling alone": of_pooling("y", places=False, operands=False),
    "gradient of pooling": of_gradient(1, ""),
    "gradient of pooling, affine": of_gradient(2, "yccc"),
}
SPLITS = {
    "batch": dict(n="data"),
    "rows": dict(s="data"),
    "channels": dict(c="data"),
    "batch and channels": dict(n="data", c="model"),
    "batch and rows": dict(n="data", s="model"),
    "batch, all devices": dict(n=AXES),
}


def drawn(kinds: str) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    n, *_, c = SHAPE
    shapes = dict(y=SHAPE, c=(c,), n=(n, c), h=(n // 2, c), p=WINDOWS.counts)
    arrays = []
    for kind in kinds:
        if kind == "q":
            arrays.append(jnp.asarray(rng.integers(0, 9, WINDOWS.counts), np.uint8))
        elif kind == "b":
            arrays.append(jnp.asarray(rng.integers(0, 256, (*SHAPE[:-1], c // 8)), np.uint8))
        else:
            dtype = jnp.bfloat16 if kind in "yp" else np.float32
            arrays.append(jnp.asarray(rng.integers(-3, 4, shapes[kind]), dtype))
    return arrays


def spec(kind: str, n=None, s=None, c=None) -> P:
    """The spec of an array; vectors are whole if the batch is split."""
    return {"c": P(c), "n": P(n, c), "h": P(n if n == "data" else None, c)}.get(
        kind, P(n, s, None, c)
    )


def placed(case: Case, mesh: Mesh, split: dict) -> list[jax.Array]:
    pairs = zip(case.operands, drawn(case.operands), strict=True)
    return [jax.device_put(a, NamedSharding(mesh, spec(k, **split))) for k, a in pairs]


def expected_collectives(case: Case, split: dict) -> dict[str, int]:
    """One sum over devices if positions are split and the results contain sums over them."""
    summed = "s" in split or ("n" in split and case.sums == 1)
    return {"all-reduce": 1} if case.sums and summed else {}


def assert_same(actual, expected) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        e = np.asarray(e, np.float64)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), e, rtol=1e-5, atol=1e-5 * abs(e).max()
        )


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_collectives(name, split, kind):
    case, axes = CASES[name], SPLITS[split]
    expected = jax.jit(case.function)(*drawn(case.operands))
    mesh = grid(kind)
    with jax.set_mesh(mesh):
        operands = placed(case, mesh, axes)
        compiled = jax.jit(case.function).lower(*operands).compile()
        results = compiled(*operands)
    assert_same(results, expected)
    moved = collectives(compiled)
    if case.windows and "s" in axes:  # every device gets all rows
        assert set(moved) <= {"all-gather", "all-to-all"}
    elif not (case.sums == 4 and axes.get("n") == AXES):  # pairs of examples are not split
        assert moved == expected_collectives(case, axes)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", CASES)
def test_results_stay_split(name, kind):
    """Nothing is gathered: results with a split dimension are split."""
    case, mesh = CASES[name], grid(kind)
    with jax.set_mesh(mesh):
        operands = placed(case, mesh, dict(n="data", c="model"))
        for result in jax.tree.leaves(jax.jit(case.function)(*operands)):
            of_sums = result.ndim < 4
            axes = (
                (None, *result.sharding.spec)
                if case.sums == 1 and of_sums
                else result.sharding.spec
            )
            assert (axes[0], axes[-1]) == (None if case.sums == 1 and of_sums else "data", "model")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_pooling_gathers_no_operand_that_is_whole(kind):
    """The gradient's rows and places are split, the normalised array is not."""
    case, mesh = CASES["gradient of pooling, affine"], grid(kind)
    expected = jax.jit(case.function)(*drawn(case.operands))
    with jax.set_mesh(mesh):
        operands = [
            jax.device_put(a, NamedSharding(mesh, spec(k, s="data" if k in "pq" else None)))
            for k, a in zip(case.operands, drawn(case.operands), strict=True)
        ]
        compiled = jax.jit(case.function).lower(*operands).compile()
        results = compiled(*operands)
    assert_same(results, expected)
    split = sum(kind in "pq" for kind in case.operands)
    assert collectives(compiled)["all-gather"] <= split


@pytest.mark.parametrize("name", CASES)
def test_uneven_shares(name):
    """An axis that devices cannot share evenly is whole on every device."""
    case, mesh = CASES[name], grid(shape=(3,), axes=("d",))
    operands = drawn(case.operands)

    def function(*operands):
        split = NamedSharding(mesh, P("d"))
        return case.function(*(lax.with_sharding_constraint(a, split) for a in operands))

    with jax.set_mesh(mesh):
        assert_same(jax.jit(function)(*operands), case.function(*operands))


# --- what each device calls -----------------------------------------------------------------------


def lowered_on_each(case: Case, axes: dict, devices: Sequence[jax.Device]) -> str:
    """The program of each device for CUDA, in the form that XLA's partitioner gets."""
    mesh = Mesh(np.reshape(devices, GRID), AXES)
    found = []

    def spread(ctx, partitioned, operands):
        found.append(partitioned)
        raise _FoundError

    operands = placed(case, mesh, axes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition.partitioned_call, "spread", spread)
        with pytest.raises(_FoundError):
            jax.jit(case.function).trace(*operands).lower(lowering_platforms=("cuda",))
    (partitioned,) = found
    assert partitioned.devices == Arrangement(((math.prod(GRID), False),))
    infos = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in operands]
    results = jax.eval_shape(case.function, *operands)
    results = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in jax.tree.leaves(results)]
    whole, body, of_results, of_operands = partitioned.partition(mesh, infos, results)
    mapped = jax.shard_map(
        body,
        mesh=Mesh(np.reshape(devices, whole.axis_sizes), whole.axis_names),
        in_specs=tuple(each.spec for each in of_operands),
        out_specs=tuple(each.spec for each in of_results),
        check_vma=False,
    )
    drawn_here = drawn(case.operands)
    return jax.jit(mapped).trace(*drawn_here).lower(lowering_platforms=("cuda",)).as_text()


class _FoundError(Exception):
    pass


@pytest.fixture
def cuda_kernels(request, monkeypatch):
    """The CUDA library, or a substitute with only its calls."""
    monkeypatch.setenv("JAXCONV_TARGET", "sm_90a")
    if isinstance(native.load("cuda"), native.Refusal):
        request.getfixturevalue("cuda_calls")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CASES)
def test_one_call_on_each_device(name, split, cuda_kernels):
    case, axes = CASES[name], SPLITS[split]
    text = lowered_on_each(case, axes, jax.devices("cpu")[:8])
    (types,) = re.findall(r"custom_call @jaxconv_\w+.* : \((.*)\) ->", text)
    n, s, _, c = SHAPE
    parts = {"data": 4, "model": 2, AXES: 8}
    if case.sums != 4:
        n //= parts[axes["n"]] if "n" in axes else 1
        s //= parts[axes["s"]] if "s" in axes and not case.windows else 1
        c //= parts[axes["c"]] if "c" in axes else 1
        s = s if "y" in case.operands else WINDOWS.counts[1]
        assert f"tensor<{n}x{s}x" in types
        assert f"x{c}xbf16>" in types
    reduced = len(re.findall(r'"stablehlo.all_reduce"', text))
    assert reduced == expected_collectives(case, axes).get("all-reduce", 0)


# --- a network's training -------------------------------------------------------------------------


def convolved(x, w, stride=1):
    w = w.astype(x.dtype)
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=numbers)


def residual_network(p, x):
    x = jax.nn.relu(batch_norm(convolved(x, p["stem"], 2), *p["bn0"]))
    window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
    x = lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME")
    y = jax.nn.relu(batch_norm(convolved(x, p["w1"]), *p["bn1"]))
    x = jax.nn.relu(batch_norm(convolved(y, p["w2"]), *p["bn2"]) + x)
    return x.astype(jnp.float32).mean((1, 2)) @ p["dense"]


def parameters() -> dict:
    rng = np.random.default_rng(0)

    def normal(*shape, scale=0.2):
        return jnp.asarray(rng.normal(size=shape) * scale, np.float32)

    bn = {f"bn{i}": (1 + normal(16), normal(16)) for i in range(3)}
    filters = dict(stem=normal(3, 3, 8, 16), w1=normal(3, 3, 16, 16), w2=normal(3, 3, 16, 16))
    return bn | filters | {"dense": normal(16, 8)}


def train(p, x, target):
    def loss(p):
        return jnp.mean((residual_network(p, x) - target) ** 2)

    value, gradients = jax.value_and_grad(loss)(p)
    return value, jax.tree.map(lambda a, g: a - 0.1 * g, p, gradients)


CALLS = {
    "jaxconv_moments": 3,
    "jaxconv_max_pool": 1,
    "jaxconv_max_pool_gradient": 1,
    "jaxconv_masked_sums": 2,
}
TRAINED = {
    "batch": (P("data"), P("data")),
    "rows": (P(None, "data"), P()),
    "batch and rows": (P("model", "data"), P("model")),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("split", TRAINED)
def test_training_step(split, kind, for_a_gpu_on_the_cpu):
    """The same as on one device, with no more sums over devices than in lax's program."""
    if kind == AxisType.Explicit and split != "batch":
        pytest.skip("lax's pooling refuses it")
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(16, 32, 16, 8)), jnp.bfloat16)
    target = jnp.asarray(rng.normal(size=(16, 8)), np.float32)
    expected = jax.jit(jaxconv.fuse(train))(parameters(), x, target)
    mesh = grid(kind)
    with jax.set_mesh(mesh):
        specs = (P(), *TRAINED[split])
        given = [
            jax.device_put(a, NamedSharding(mesh, s))
            for a, s in zip((parameters(), x, target), specs, strict=True)
        ]
        program = jax.make_jaxpr(jaxconv.fuse(train))(*given)
        fused, plain = (jax.jit(f).lower(*given).compile() for f in (jaxconv.fuse(train), train))
        actual = fused(*given)
    assert_close(actual, expected, 0.02)
    found = collections.Counter(eqn.primitive.name for eqn in equations(program))
    assert {name: found[name] for name in CALLS} == CALLS
    if split == "batch":
        assert set(collectives(fused)) == {"all-reduce"}
        assert collectives(fused)["all-reduce"] <= collectives(plain)["all-reduce"]


def squeeze_and_excitation(p, x):
    z = jax.nn.silu(batch_norm(convolved(x, p["stem"], 1), *p["bn0"]))
    gate = jax.nn.sigmoid(z.astype(jnp.float32).mean((1, 2)) @ p["dense"] @ p["dense"].T)
    r = convolved(z * gate[:, None, None].astype(z.dtype), p["w1"])
    return (r.astype(jnp.float32) ** 2).mean()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("inside", [True, False], ids=["within the mesh", "by the arguments"])
@pytest.mark.parametrize("split", [P("data"), P(AXES), P("model", "data")], ids=str)
def test_gated_training_step(split, inside, kind, for_a_gpu_on_the_cpu):
    """The same as on one device, with no more sums over devices than in lax's program."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(16, 64, 128, 8)), jnp.bfloat16)
    expected = jax.jit(jax.grad(jaxconv.fuse(squeeze_and_excitation)))(parameters(), x)
    mesh = grid(kind)
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        given = [
            jax.device_put(a, NamedSharding(mesh, s))
            for a, s in zip((parameters(), x), (P(), split), strict=True)
        ]
        step, plain = (
            jax.grad(f) for f in (jaxconv.fuse(squeeze_and_excitation), squeeze_and_excitation)
        )
        program = jax.make_jaxpr(step)(*given)
        fused, lax_program = (jax.jit(f).lower(*given).compile() for f in (step, plain))
        actual = fused(*given)
    assert_close(actual, expected, 0.02)
    found = collections.Counter(eqn.primitive.name for eqn in equations(program))
    assert found["jaxconv_gated"] == found["jaxconv_activated_sums"] == 1
    assert found["jaxconv_masked_sums"] == 1
    assert collectives(fused)["all-reduce"] <= collectives(lax_program)["all-reduce"]
