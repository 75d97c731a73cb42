"""Every kernel with the fused epilogue, forced by name, on every problem: exact, or refused.

The counterpart of test_every_kernel.py for problems with an epilogue. Activations that are not
exact are compared with float64, on one problem for each kernel.
"""

import dataclasses
import functools

import kernel_tables
import numpy as np
import pytest
from epilogue_reference import before_activation, exact_terms, results, rounded
from every_kernel import LEAST_ACCEPTED, Forced, Prepared
from numerics import exact_operands, mismatch
from problems import DTYPES, OF_FAMILY, PROBLEMS, REPRESENTATIVE, Problem

from jaxconv._src.conv.bilinear import select as select_plain
from jaxconv._src.conv.fused import Fused, bind
from jaxconv._src.problem.epilogue import Epilogue
from jaxconv._src.problem.spec import Op

# Every term alone and all together; every exact activation. A kernel's calls cycle through them.
EXACT = [
    Epilogue(scale=True, bias=True, residual=True, activation="relu", pre=True),
    Epilogue(scale=True, bias=True),
    Epilogue(residual=True, activation="relu6"),
    Epilogue(bias=True, activation="leaky_relu", slope=0.25),
    Epilogue(scale=True, residual=True, activation="leaky_relu", slope=-0.5, pre=True),
    Epilogue(bias=True, activation="relu"),
    Epilogue(activation="relu6", pre=True),
]
# The exact epilogues of kernels that apply only scale, bias, and a clamp or SWISHES.
CLAMPS = [
    Epilogue(scale=True, bias=True),
    Epilogue(bias=True, activation="relu"),
    Epilogue(scale=True, activation="relu6"),
]
SWISHES = ("silu", "hard_swish")
ROUNDED = ("gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "hard_swish")
# One rounding to the result's dtype, with the error of activations of 16-bit results; for float32,
# four units in the last place.
ROUNDING = {"f32": 5e-7, "bf16": 3.95e-3, "f16": 4.96e-4}

FUSED = [
    pytest.param(each, marks=pytest.mark.gpu, id=each.name)
    for each in kernel_tables.fused_instances()
]


def without_residual(each: kernel_tables.Instance) -> bool:
    return each.family == "few_channels" and "_stride" in each.variant


def chosen_for(problem: Problem, dtype: str, form: Epilogue, instance: str, layout: str = "last"):
    spec = problem.spec(algorithm=instance, layout=layout)
    sizes = problem.sizes(Op.FPROP, spec, layout)
    return Fused(spec, form, DTYPES[dtype][1]).select("cuda", sizes, DTYPES[dtype][0])


def fused_call(
    problem: Problem, dtype: str, form: Epilogue, instance: str, layout: str, repro: str, seed: int
) -> Prepared:
    """The call, its operands, and a function that compares its results with the definition."""
    x, w, sums = exact_operands(Op.FPROP, problem, dtype)
    terms = exact_terms(problem, form, dtype, [seed, problem.k])
    spec = problem.spec(algorithm=instance, layout=layout)

    def call(x, w, *given):
        named = dict(zip(form.terms, given, strict=True))
        return bind(x, w, named, spec=spec, epilogue=form, out_dtype=DTYPES[dtype][1])

    def judge(actual):
        y, *pre = (problem.to_canonical("y", a, layout) for a in actual[: 1 + form.pre])
        exact, *t = results(form, terms, sums)
        if form.activation in ROUNDED:
            yield inaccuracy(y, exact, before_activation(sums, terms), dtype, repro)
        else:
            yield mismatch(y, rounded(exact, dtype), repro)
        for actual, expected in zip(pre, t, strict=True):
            yield mismatch(actual, rounded(expected, dtype), f"{repro}, pre")

    arrays = [problem.to_layout("x", x, layout), problem.to_layout("w", w, layout)]
    arrays += [problem.to_layout("y", a, layout) if a.ndim > 1 else a for a in terms.values()]
    return call, arrays, judge


def inaccuracy(y, exact: np.ndarray, t: np.ndarray, dtype: str, repro: str) -> str:
    """A complaint, or "" within one rounding of float64 (float32: some units in the last place)."""
    error = np.abs(np.asarray(y).astype(np.float64) - exact)
    share = error / (ROUNDING[dtype] * np.abs(exact) + 3e-7 * np.abs(t) + 6e-8)
    return "" if (share <= 1).all() else f"{repro}: {share.max():.3g} of the allowed error"


@pytest.mark.parametrize("each", FUSED)
def test_exact_or_refused(each):
    """Operands are integers whose sums are exact in any order: results are compared bit by bit."""
    forced, accepted = Forced("cuda", each.name), []
    forms = CLAMPS if without_residual(each) else EXACT
    for problem in [*PROBLEMS, *OF_FAMILY.get(each.family, [])]:
        if problem.batch is not None or 0 in problem.canonical_shape("y"):
            continue
        for layout in ("last", "first") if problem in REPRESENTATIVE else ("last",):
            if forced.takes(*chosen_for(problem, each.dtype, forms[0], each.name, layout)):
                accepted.append((problem, layout))
    # As many calls as there are problems, but at least one for each epilogue.
    for i in range(max(len(accepted), LEAST_ACCEPTED, len(forms)) if accepted else 0):
        (problem, layout), form = accepted[i % len(accepted)], forms[i % len(forms)]
        chosen, line = chosen_for(problem, each.dtype, form, each.name, layout)
        assert forced.takes(chosen, line), f"{line}\n  refused: {chosen.refusals}"
        what = (problem, each.dtype, form, each.name, layout, f"{each.name} ({layout}): {line}", i)
        forced.calls.append(functools.partial(fused_call, *what))
    forced.check()


@pytest.mark.parametrize("each", FUSED)
def test_activations(each):
    """Activations that are not exact, on one problem: with all terms, and swishes without."""
    linear = Epilogue(scale=True, bias=True)
    forms = [dataclasses.replace(linear, activation=name) for name in SWISHES]
    if not without_residual(each):
        full = dataclasses.replace(linear, residual=True, pre=True)
        forms += [dataclasses.replace(full, activation=name) for name in ROUNDED]
    problem = next(
        p
        for p in [*OF_FAMILY.get(each.family, []), *PROBLEMS]
        if p.batch is None and chosen_for(p, each.dtype, forms[-1], each.name)[0].instance
    )
    forced = Forced("cuda", each.name)
    for form in forms:
        what = (problem, each.dtype, form, each.name, "last", f"{each.name} {form.activation}", 0)
        forced.calls.append(functools.partial(fused_call, *what))
    forced.check(len(forms))


@pytest.mark.gpu
def test_auto_fuses_layers_of_every_class():
    """Selection takes a kernel with the epilogue for a layer of every class."""
    form = Epilogue(scale=True, bias=True, residual=True, activation="relu")
    for problem in REPRESENTATIVE:
        if problem.batch is not None:
            continue
        spec = problem.spec(algorithm="native")
        sizes = problem.sizes(Op.FPROP, spec)
        for dtype in ("f32", "bf16", "f16"):
            plain, _ = select_plain("cuda", Op.FPROP, spec, sizes, *DTYPES[dtype])
            operands, result = DTYPES[dtype]
            chosen, line = Fused(spec, form, result).select("cuda", sizes, operands)
            assert (chosen.instance is None) == (plain.instance is None), (line, chosen.refusals)
            assert chosen.instance is None or chosen.instance.endswith("_fused")
