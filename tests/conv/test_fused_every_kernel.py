"""Every kernel with the fused epilogue, forced by name, on every problem: exact, or refused.

The same as test_every_kernel.py for the kernels of problems that have an epilogue. Activations that
are not exact are compared with float64, on one problem of each kernel.
"""

from __future__ import annotations

import jax
import kernel_tables
import numpy as np
import pytest
from numerics import TOGETHER, exact_operands, into_poison, mismatch
from problems import DTYPES, PROBLEMS, REPRESENTATIVE, Problem
from test_every_kernel import LEAST_ACCEPTED, OF_FAMILY
from test_fused import defined

from jaxconv._src.conv.bilinear import select as select_plain
from jaxconv._src.conv.fused import Fused, bind
from jaxconv._src.problem.epilogue import Epilogue
from jaxconv._src.problem.spec import Op

# Every term alone and together, every exact activation. A kernel's calls take them in turn.
EXACT = [
    Epilogue(scale=True, bias=True, residual=True, activation="relu", pre=True),
    Epilogue(scale=True, bias=True),
    Epilogue(residual=True, activation="relu6"),
    Epilogue(bias=True, activation="leaky_relu", slope=0.25),
    Epilogue(scale=True, residual=True, activation="leaky_relu", slope=-0.5, pre=True),
    Epilogue(bias=True, activation="relu"),
    Epilogue(activation="relu6", pre=True),
]
# What kernels take that finish a sum with its channel's scale, bias and a clamp, and nothing else.
CLAMPS = [
    Epilogue(scale=True, bias=True),
    Epilogue(bias=True, activation="relu"),
    Epilogue(scale=True, activation="relu6"),
]
ROUNDED = ("gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "hard_swish")
# One rounding to the result's dtype; of float32 four units in the last place.
ROUNDING = {"f32": 5e-7, "bf16": 3.95e-3, "f16": 4.9e-4}

FUSED = [
    pytest.param(each, marks=pytest.mark.gpu, id=each.name)
    for each in kernel_tables.fused_instances()
]


def clamps_alone(each: kernel_tables.Instance) -> bool:
    return each.family == "few_channels" and "_stride" in each.variant


def operands_of(problem: Problem, dtype: str, form: Epilogue, seed: int):
    """x, w and the terms, canonical, and t in float64: exact in float32."""
    x, w, sums = exact_operands(Op.FPROP, problem, dtype)
    rng = np.random.default_rng([seed, problem.k])
    drawn = {
        "scale": (2.0 ** rng.integers(-2, 2, problem.k)).astype(np.float32),
        "bias": (rng.integers(-12, 13, problem.k) / 4).astype(np.float32),
        "residual": (rng.integers(-16, 17, sums.shape) / 2).astype(sums.dtype),
    }
    terms = {name: drawn[name] for name in form.terms}
    t = sums.astype(np.float64) * terms.get("scale", 1.0)
    for name in ("bias", "residual"):
        t = t + terms[name].astype(np.float64) if name in terms else t
    return x, w, terms, t


def activated(form: Epilogue, t: np.ndarray) -> np.ndarray:
    activation = form.activation
    return defined((activation, form.slope) if activation == "leaky_relu" else activation, t)


def call_of(problem: Problem, dtype: str, form: Epilogue, instance: str, layout: str):
    """(x, w, terms) -> results, all in the layout's axis order."""
    spec = problem.spec(algorithm=instance, layout=layout)

    def call(x, w, terms):
        terms = {name: terms[name] for name in form.terms}  # jit sorts a dict's keys
        return bind(x, w, terms, spec=spec, epilogue=form, out_dtype=DTYPES[dtype][1])

    return call


def chosen_for(problem: Problem, dtype: str, form: Epilogue, instance: str, layout: str):
    spec = problem.spec(algorithm=instance, layout=layout)
    shapes = [
        problem.to_layout(role, np.empty(problem.canonical_shape(role)), layout).shape
        for role in "xw"
    ]
    sizes = spec.sizes(Op.FPROP, *shapes)
    return Fused(spec, form, DTYPES[dtype][1]).select("cuda", sizes, DTYPES[dtype][0])


def in_layout(problem: Problem, x, w, terms, layout: str):
    terms = {n: problem.to_layout("y", a, layout) if a.ndim > 1 else a for n, a in terms.items()}
    return problem.to_layout("x", x, layout), problem.to_layout("w", w, layout), terms


@pytest.mark.parametrize("each", FUSED)
def test_exact_or_refused(each):
    """Integers whose sums are representable: any order of summation gives the same bits."""
    failures, accepted = [], []
    forms = CLAMPS if clamps_alone(each) else EXACT
    for problem in [*PROBLEMS, *OF_FAMILY.get(each.family, [])]:
        if problem.batch is not None or 0 in problem.canonical_shape("y"):
            continue
        for layout in ("last", "first") if problem in REPRESENTATIVE else ("last",):
            chosen, line = chosen_for(problem, each.dtype, forms[0], each.name, layout)
            if chosen.instance is not None:
                accepted.append((problem, layout))
            elif not all(r.reason.strip() for r in chosen.refusals):
                failures.append(f"{line}\n  refused without a reason: {chosen.refusals}")
    # As many calls as there are problems, and at least one with each epilogue.
    calls = []
    for i in range(max(len(accepted), LEAST_ACCEPTED, len(forms)) if accepted else 0):
        (problem, layout), form = accepted[i % len(accepted)], forms[i % len(forms)]
        chosen, line = chosen_for(problem, each.dtype, form, each.name, layout)
        assert chosen.instance == each.name, f"{line}\n  refused: {chosen.refusals}"
        calls.append((problem, form, layout, line))
    device = jax.devices("gpu")[0]
    with jax.default_device(device):
        for at in range(0, len(calls), TOGETHER):
            failures += wrong_results(each.name, each.dtype, calls[at : at + TOGETHER])
    assert not failures, "\n".join(failures)
    assert len(calls) >= LEAST_ACCEPTED, f"{each.name} took only {len(calls)} problems"


def wrong_results(instance: str, dtype: str, calls: list) -> list[str]:
    """What is wrong with the results of these (problem, form, layout, repro), of one program."""
    functions, operands, right = [], [], []
    for seed, (problem, form, layout, _) in enumerate(calls):
        x, w, terms, t = operands_of(problem, dtype, form, seed)
        functions.append(call_of(problem, dtype, form, instance, layout))
        operands.append(in_layout(problem, x, w, terms, layout))
        right.append([activated(form, t), *[t] * form.pre])

    def together(*operands):
        return [call(*of) for call, of in zip(functions, operands, strict=True)]

    reports = []
    for (problem, _, layout, line), actual, expected in zip(
        calls, into_poison(together, *operands), right, strict=True
    ):
        for name, a, e in zip(("y", "pre"), actual, expected, strict=False):
            rounded = e.astype(np.float32).astype(DTYPES[dtype][1])
            repro = f"{instance} ({layout}), {name}: {line}"
            reports.append(mismatch(problem.to_canonical("y", a, layout), rounded, repro))
    return [report for report in reports if report]


@pytest.mark.parametrize("each", [each for each in FUSED if not clamps_alone(*each.values)])
def test_activations(each):
    """Within one rounding of float64, and of float32 within some units in the last place."""
    base = Epilogue(scale=True, bias=True, residual=True)
    problem = next(
        p
        for p in [*OF_FAMILY.get(each.family, []), *PROBLEMS]
        if p.batch is None and chosen_for(p, each.dtype, base, each.name, "last")[0].instance
    )
    x, w, terms, t = operands_of(problem, each.dtype, base, 0)
    with jax.default_device(jax.devices("gpu")[0]):
        for activation in ROUNDED:
            form = Epilogue(scale=True, bias=True, residual=True, activation=activation, pre=True)
            call = call_of(problem, each.dtype, form, each.name, "last")
            y, pre = into_poison(call, x, w, terms)
            assert not mismatch(pre, t.astype(np.float32).astype(DTYPES[each.dtype][1]), "pre")
            expected = activated(form, t)
            error = np.abs(np.asarray(y).astype(np.float64) - expected)
            allowed = ROUNDING[each.dtype] * np.abs(expected) + 3e-7 * np.abs(t) + 6e-8
            assert (error <= allowed).all(), (each.name, activation, (error / allowed).max())


@pytest.mark.gpu
def test_auto_fuses_layers_of_every_class():
    """Without a demanded kernel a layer's epilogue is in the convolution's kernel."""
    form = Epilogue(scale=True, bias=True, residual=True, activation="relu")
    for problem in REPRESENTATIVE:
        if problem.batch is not None:
            continue
        spec = problem.spec(algorithm="native")
        sizes = spec.sizes(Op.FPROP, *(problem.canonical_shape(role) for role in "xw"))
        for dtype in ("f32", "bf16", "f16"):
            plain, _ = select_plain("cuda", Op.FPROP, spec, sizes, *DTYPES[dtype])
            operands, result = DTYPES[dtype]
            chosen, line = Fused(spec, form, result).select("cuda", sizes, operands)
            assert (chosen.instance is None) == (plain.instance is None), (line, chosen.refusals)
            assert chosen.instance is None or chosen.instance.endswith("_fused")
