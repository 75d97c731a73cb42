"""Rewrites programs: the chains that ``fuse_chain`` finds become calls of ``conv_fused``.

In the program itself and in every function that it calls: jit, remat, scan, while, cond, shard_map,
custom derivatives. All other equations stay what they are, so that names, source locations, effects
and derivatives do.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat
from jaxconv._src.call import override_state, record
from jaxconv._src.conv import fused
from jaxconv._src.fuse import (
    fuse_activations,
    fuse_chain,
    fuse_convolution,
    fuse_dense,
    fuse_gates,
    fuse_layers,
    fuse_means,
    fuse_parameters,
    fuse_pooled_moments,
    fuse_pooling,
    fuse_reasons,
    fuse_rounding,
    fuse_statistics,
)
from jaxconv._src.fuse.fuse_chain import Fusion
from jaxconv._src.fuse.fuse_convolution import Convolution
from jaxconv._src.fuse.fuse_graph import Graph, live, traced, type_of
from jaxconv._src.fuse.fuse_statistics import Moment
from jaxconv._src.lax import fold_padding
from jaxconv._src.lax.inlining import JITTED, inlined
from jaxconv._src.library import native
from jaxconv._src.passes import gated, masked_sums, normalise
from jaxconv._src.problem import epilogue

# A jitted function without a convolution, such as jax.nn.silu, is inlined up to this many
# equations.
_INLINED = 64

# Why a chain ends before a batch norm in training.
_WHOLE_RESULT = "what follows takes the statistics of the whole result"

# Names that mark the program of a derivative, or of layers that are calls.
_BACKWARD = {"jaxconv_wgrad", masked_sums.TARGET, normalise.TARGET, gated.TARGET}

# Operations whose jaxprs XLA does not compile.
_OPAQUE = ("pallas_call", "core_map", "run_state")


def rewritten(closed: Any, fold: bool) -> tuple[Any, list[Any]]:
    """A program with calls of ``conv_fused``, and the constants that it has besides.

    Args:
        closed: the program, as ``jax.make_jaxpr`` gives it.
        fold: multiply scales into filters where both are constants.
    """
    jaxpr = compat.open_jaxpr(closed)
    known = {
        var: value
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True)
        if not compat.is_traced(value)
    }
    extra: dict[Var, Any] = {}
    jaxpr = _fused(jaxpr, known, extra if fold else None, whole=True)
    return jaxpr.replace(constvars=[*jaxpr.constvars, *extra]), list(extra.values())


class _RefusedError(Exception):
    """A chain that cannot become a call."""

    def __init__(self, position: int, reason: str, statistics: bool):
        super().__init__(reason)
        self.position = position
        self.reason = reason
        self.statistics = statistics  # there may be a call without them


def _fused(
    jaxpr: Any,
    known: Mapping[Var, Any],
    extra: dict[Var, Any] | None = None,
    *,
    transposed: bool = False,
    whole: bool = False,
) -> Any:
    """A program, not closed, with its chains as calls.

    Args:
        jaxpr: the program.
        known: values of its constants.
        extra: receives additional constants (filters with their scales); None: there are none.
        transposed: whether it belongs to a backward pass.
        whole: whether no other program calls it, so that its arguments are parameters.
    """
    eqns, outvars, forward = jaxpr.eqns, jaxpr.outvars, False
    if _convolves(jaxpr):
        eqns, outvars = inlined(jaxpr, _becomes_part)
        eqns = fold_padding.folded(eqns, outvars, known)
        eqns = _with_chains(Graph(live(eqns, outvars), outvars, known), outvars, extra, transposed)
        forward = not (transposed or any(map(_of_a_derivative, eqns)))
    if forward:
        eqns = _with_layers(eqns, outvars)
    if whole:
        eqns = fuse_parameters.rewritten(eqns, outvars)
    if forward:
        eqns = fuse_pooled_moments.rewritten(eqns, outvars)
        eqns = fuse_rounding.rewritten(eqns, outvars)
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def _with_chains(
    graph: Graph, outvars: list[Any], extra: dict[Var, Any] | None, transposed: bool
) -> list[JaxprEqn]:
    """The equations of a program with its chains as calls."""
    refused = _Refused()
    while True:
        before = refused.count
        if extra is not None:
            extra.clear()
        eqns = _with_calls_traced(graph, outvars, refused, extra, transposed)
        if refused.count == before:
            return eqns


def _with_layers(eqns: Sequence[JaxprEqn], outvars: list[Any]) -> list[JaxprEqn]:
    """The equations of a forward program with its layers as calls."""
    eqns = live(fuse_layers.with_moments(eqns, outvars), outvars)
    eqns = live(fuse_layers.rewritten(eqns, outvars), outvars)
    eqns = live(fuse_pooling.rewritten(eqns, outvars, fuse_layers.in_memory), outvars)
    eqns = live(fuse_means.rewritten(eqns, outvars), outvars)
    eqns = live(fuse_gates.rewritten(eqns, outvars), outvars)
    eqns = fuse_layers.with_readers(eqns, outvars)
    return live(fuse_dense.rewritten(eqns, outvars), outvars)


def _of_a_derivative(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _BACKWARD or compat.transposed(eqn)


@dataclasses.dataclass(frozen=True)
class _Refused:
    """Why convolutions, by position, get no call, or no call with statistics."""

    calls: dict[int, str] = dataclasses.field(default_factory=dict)
    statistics: dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.calls) + len(self.statistics)


def _with_calls_traced(
    graph: Graph,
    outvars: list[Any],
    refused: _Refused,
    extra: dict[Var, Any] | None,
    transposed: bool,
) -> list[JaxprEqn]:
    """The equations of a program with its chains as calls, except for the refused ones.

    The result is valid only if ``refused`` did not grow.
    """
    fusions: dict[int, Fusion] = {}
    notes = dict(refused.calls)
    ends: dict[int, tuple[Var, int]] = {}
    without: set[int] = set()
    taken: set[int] = set()
    # From the end: if two convolutions are added, the earlier one is the residual of the later one.
    for position in reversed(range(len(graph.eqns))):
        name = graph.eqns[position].primitive.name
        if name not in fuse_convolution.NAMES or position in refused.calls:
            continue
        conv = fuse_convolution.find(graph, position)
        (whole,) = graph.eqns[position].outvars
        ends[position] = whole, fuse_convolution.channel_axis(graph.eqns[position])
        if isinstance(conv, str):
            notes[position] = conv
            without.add(position)
            continue
        fusion, notes[position] = fuse_chain.follow(graph, conv, taken)
        if (counted := fuse_chain.with_statistics(graph, conv, fusion)) is not None:
            notes[position] = refused.statistics.get(position, _WHOLE_RESULT)
            fusion = fusion if position in refused.statistics else counted
        if fusion is not None:
            fusions[position] = fusion
            taken |= fusion.chain.taken
            ends[position] = fusion.chain.out, fusion.chain.axis
    for position, (end, axis) in ends.items():
        alone = (graph, end, axis, taken, notes[position])
        notes[position] = fuse_reasons.end_reason(*alone, refused=position in without)
    rewritten: list[JaxprEqn] = []
    results = {fusion.chain.out for fusion in fusions.values()}
    for item in live(_with_calls(graph, fusions, notes), outvars, _without_unused):
        try:
            if isinstance(item, _FusedCall):
                rewritten += _traced_call(graph, item, results, extra)
            elif isinstance(item, _Answer):
                rewritten += _traced_answer(graph, item)
            else:
                rewritten.append(_descended(item, transposed))
        except _RefusedError as refusal:
            kind = refused.statistics if refusal.statistics else refused.calls
            kind[refusal.position] = refusal.reason
    return rewritten


# --- functions that a program calls ---

# Fused functions by the original, so that a jitted function that is called again reuses its
# executable.
_known: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _subprograms(eqn: JaxprEqn) -> list[tuple[str, int | None, Any]]:
    """The jaxprs among an equation's parameters: name, index in a tuple, jaxpr."""
    found: list[tuple[str, int | None, Any]] = []
    if eqn.primitive.name in _OPAQUE:
        return found
    for name, value in eqn.params.items():
        if isinstance(value, tuple | list):
            found += [(name, i, v) for i, v in enumerate(value) if hasattr(v, "eqns")]
        elif hasattr(value, "eqns"):
            found.append((name, None, value))
    return found


def _convolves(jaxpr: Any) -> bool:
    """Whether a program or a function that it calls has convolutions."""
    return any(
        eqn.primitive.name in fuse_convolution.NAMES
        or any(_convolves(inner) for _, _, inner in _subprograms(eqn))
        for eqn in jaxpr.eqns
    )


def _descended(eqn: JaxprEqn, transposed: bool) -> JaxprEqn:
    """An equation with the functions that it calls fused."""
    transposed = transposed or compat.transposed(eqn)
    params = dict(eqn.params)
    for name, place, inner in _subprograms(eqn):
        if not _convolves(inner):
            continue
        if place is None:
            params[name] = _function(inner, transposed)
        else:
            values = list(params[name])
            values[place] = _function(inner, transposed)
            kind = type(params[name])
            params[name] = kind._make(values) if hasattr(kind, "_make") else kind(values)
    return eqn.replace(params=params)


def _function(jaxpr: Any, transposed: bool) -> Any:
    """A function that a program calls, fused; its constants are not known."""
    found = _known.setdefault(jaxpr, {})
    state = override_state.algorithms_of_lax(), fuse_convolution.platforms(), native.target()
    key = *state, transposed
    if key not in found:
        fused_jaxpr = _fused(compat.open_jaxpr(jaxpr), {}, transposed=transposed)
        found[key] = compat.with_jaxpr(jaxpr, fused_jaxpr)
    return found[key]


# --- calls ---


@dataclasses.dataclass(frozen=True)
class _FusedCall:
    """A call that replaces a chain; ``fuse_graph.live`` reads it like an equation."""

    fusion: Fusion
    pre: Var | None
    statistics: Var | None
    note: str

    @property
    def outvars(self) -> tuple[Var, ...]:
        results = (self.fusion.chain.out, self.pre, self.statistics)
        return tuple(v for v in results if v is not None)

    @property
    def invars(self) -> list[Any]:
        atoms = [self.fusion.conv.x, self.fusion.conv.w]
        atoms += [t.vector.atom for t in self.fusion.chain.terms if t.vector is not None]
        return atoms if self.fusion.residual is None else [*atoms, self.fusion.residual]

    effects = frozenset[Any]()


@dataclasses.dataclass(frozen=True)
class _Answer:
    """A sum over a call's result, from its statistics; ``fuse_graph.live`` reads it too."""

    fusion: Fusion
    moment: Moment
    statistics: Var

    @property
    def outvars(self) -> tuple[Var, ...]:
        return (self.moment.out,)

    @property
    def invars(self) -> list[Any]:
        return [self.statistics, *self.moment.atoms]

    effects = frozenset[Any]()


def _without_unused(item: Any, needed: Collection[Var]) -> Any:
    """A call without the activation's operand among its results unless an equation needs it."""
    if isinstance(item, _FusedCall) and item.pre is not None and item.pre not in needed:
        return dataclasses.replace(item, pre=None)
    return item


def _traced_answer(graph: Graph, answer: _Answer) -> list[JaxprEqn]:
    """The equations of a sum.

    Raises:
        _RefusedError: the result has another type than the variable.
    """
    whole = type_of(graph.eqns[answer.fusion.conv.position].outvars[0])
    count = whole.size // type_of(answer.statistics).shape[1]
    try:
        return fuse_statistics.answered(graph, answer.moment, answer.statistics, count)
    except (TypeError, ValueError, compat.ShardingTypeError) as error:
        reason = str(error).splitlines()[0]
        raise _RefusedError(answer.fusion.conv.position, reason, True) from error


def _traced_call(
    graph: Graph, call: _FusedCall, results_of_calls: Collection[Var], extra: dict[Var, Any] | None
) -> list[JaxprEqn]:
    """The equations of a call: scale and bias, ``conv_fused``, and the results' shapes.

    Args:
        graph: the program.
        call: the call.
        results_of_calls: the results of this and other calls.
        extra: receives the filter times its scale, or None.

    Raises:
        _RefusedError: no call computes the chain.
    """
    conv, chain = call.fusion.conv, call.fusion.chain
    (whole,) = graph.eqns[conv.position].outvars
    channels = type_of(whole).shape[conv.channel_axis]
    vectors = [t.vector.atom for t in chain.terms if t.vector is not None]
    residual = [] if call.fusion.residual is None else [call.fusion.residual]
    w = conv.w
    folded = None if extra is None else _folded_filter(graph, call.fusion, channels)
    if folded is not None and extra is not None:
        w = compat.variable(type_of(conv.w))
        extra[w] = folded

    scaled, shifted = chain.scales and folded is None, chain.shifts
    out_dtype = type_of(chain.out).dtype
    name, slope = epilogue.parse_activation(chain.activation)
    results = call.pre is not None, call.statistics is not None
    written = None
    if chain.pre is not None and chain.activated is not None and chain.activation is not None:
        written = fuse_activations.written(graph, chain.pre, chain.activated, chain.activation)
    form = epilogue.Epilogue(scaled, shifted, bool(residual), name, slope, *results, written)
    # XLA would store the residual only for the call, which costs the pass that the call saves.
    computed = graph.computed_for_one_use(call.fusion.residual, results_of_calls)
    readers = len(graph.uses(chain.out)) if graph.absorbed(chain.out) else int(computed)
    types = type_of(conv.x), type_of(conv.w)
    if reason := fuse_convolution.slower(conv.spec, types, form, out_dtype, readers):
        raise _RefusedError(conv.position, reason, form.statistics)

    def compute(x: Any, w: Any, vectors: list[Any], residual: list[Any]) -> list[Any]:
        scale, bias = fuse_chain.affine(chain.terms, vectors, channels)
        given: dict[str, Any] = {"scale": scale, "bias": bias}
        if residual:
            given["residual"] = residual[0].reshape(type_of(whole).shape)
        terms = {term: given[term] for term in form.terms}
        results = fused.bind(x, w, terms, spec=conv.spec, epilogue=form, out_dtype=out_dtype)
        return [r.reshape(type_of(v).shape) for r, v in zip(results, call.outvars, strict=True)]

    try:
        eqns = traced(compute, (conv.x, w, vectors, residual), call.outvars, graph, conv.position)
    except (TypeError, ValueError, compat.ShardingTypeError) as error:
        reason = str(error).splitlines()[0]
        raise _RefusedError(conv.position, reason, form.statistics) from error
    caller = graph.eqns[conv.position]
    return [
        compat.within(caller, _noted(e, call.note) if e.primitive is fused.conv_fused_p else e)
        for e in eqns
    ]


def _noted(eqn: JaxprEqn, note: str) -> JaxprEqn:
    """A convolution with a note about the end of its chain, for ``explain``."""
    return compat.annotated(eqn, **{record.CHAIN_END: note}) if note else eqn


# --- equations ---


def _becomes_part(eqn: JaxprEqn) -> bool:
    """Whether a call is of a jitted function that may be part of an epilogue."""
    if eqn.primitive.name not in JITTED or not compat.inlinable(eqn):
        return False
    called = compat.open_jaxpr(eqn.params["jaxpr"])
    return (
        not called.constvars
        and not getattr(eqn.params["jaxpr"], "consts", ())
        and len(called.eqns) <= _INLINED
        and not _convolves(called)
    )


def _with_calls(
    graph: Graph, fusions: Mapping[int, Fusion], notes: Mapping[int, str]
) -> list[JaxprEqn | _FusedCall | _Answer]:
    """The program with calls that replace chains, and notes at the other convolutions."""
    placed: dict[int, list[_FusedCall | _Answer]] = {}
    dropped: set[int] = set()
    redirected: dict[int, tuple[Var, Var]] = {}
    again: dict[int, JaxprEqn] = {}
    for position, fusion in fusions.items():
        chain = fusion.chain
        pre = chain.pre if fusion.keeps_pre else None
        statistics = _statistics(graph, fusion.conv) if fusion.moments else None
        placed[fusion.position] = [_FusedCall(fusion, pre, statistics, notes[position])]
        for moment in fusion.moments:
            made = graph.index(moment.out)
            assert made is not None and statistics is not None
            placed.setdefault(made, []).append(_Answer(fusion, moment, statistics))
            dropped.add(made)
        dropped |= {position, *chain.taken}
        if chain.pre is not None and type_of(chain.pre).shape == type_of(chain.out).shape:
            redirected |= {i: (chain.pre, chain.out) for i in fusion.redirected}
        if fusion.compared:
            made = graph.index(chain.out)
            assert made is not None
            of_pre = compat.variable(type_of(chain.out))
            again[made] = graph.eqns[made].replace(outvars=[of_pre])
            redirected |= {i: (chain.out, of_pre) for i in fusion.compared}
    items: list[JaxprEqn | _FusedCall | _Answer] = []
    for position, eqn in enumerate(graph.eqns):
        items += placed.get(position, [])
        if position in again:
            items.append(again[position])
        if position in dropped:
            continue
        if position in redirected:
            before, after = redirected[position]
            eqn = eqn.replace(invars=[after if a is before else a for a in eqn.invars])
        if note := notes.get(position):
            eqn = _noted(eqn, note)
        items.append(eqn)
    return items


def _statistics(graph: Graph, conv: Convolution) -> Var:
    """A variable for the statistics of a convolution's call."""
    y = type_of(graph.eqns[conv.position].outvars[0])
    return compat.variable(fused.moments_type(conv.spec, y, np.dtype(np.float32)))


# --- constants ---


def _folded_filter(graph: Graph, fusion: Fusion, channels: int) -> jax.Array | None:
    """The filter times the scale if both are constants, else None."""
    terms = fusion.chain.terms
    if not fusion.chain.scales:
        return None
    with jax.ensure_compile_time_eval():
        w = _evaluated(graph, fusion.conv.w)
        vectors = []
        for term in terms:
            if term.vector is None:
                continue
            vector = _evaluated(graph, term.vector.atom)
            if vector is None and term.op not in ("add", "sub", "rsub"):
                return None
            vectors.append(jnp.zeros(type_of(term.vector.atom).shape) if vector is None else vector)
        if w is None:
            return None
        scale, _ = fuse_chain.affine(terms, vectors, channels)
        assert scale is not None, "a chain that scales"
        others = [a for a in range(w.ndim) if a != fusion.conv.spec.axis("w", "k")]
        return (w.astype(jnp.float32) * lax.expand_dims(scale, others)).astype(w.dtype)


def _evaluated(graph: Graph, atom: Any) -> Any:
    """The value of an atom that depends only on constants, or None."""
    compute = graph.function(atom)
    return None if compute is None else compute()
