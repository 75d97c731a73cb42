"""``fuse`` depends on what a layer computes, not on its spelling: same calls, same accuracy.

Every run takes some of the spellings, by ``--seed``; ``--slow`` takes all of them, and random ones.
``python tests/fuse/spellings.py --table`` shows the calls of each.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
import spelling_calls
import spellings
from spelling_calls import ORDERS
from spelling_groups import GROUPS
from spellings import GROUPED, SPELLINGS, Spelling, canonical

import jaxconv
from jaxconv._src.library import native

pytestmark = pytest.mark.usefixtures("on_the_cpu")

ALL = {**SPELLINGS, **GROUPED}

# Spellings in a run: those whose calls or results are compared; random ones with --slow.
TRACED, COMPUTED, RANDOM = 24, 5, 60

# Targets of ``fuse``: CPUs, and an sm_90a GPU, which need not be present.
TARGETS = ("", "sm_90a")

# Spellings whose sums in the backward pass XLA computes, although a kernel has the derivative: the
# product of y with a clipped array, and a maximum of two multiples of y, behind these norms.
BY_XLA = {
    "affine (y - m) * rsqrt * g + b; maximum(y, 0.1 y); float32 NHWC",
    "y * clip(y + 3, 0, 6) / 6; float32 NHWC",
    "affine (y * g - m * g) * rsqrt + b; y * clip(y / 6 + 1 / 2, 0, 1); float16 NHWC",
}

# The largest ratio of the fused error to the unfused error, both norms over arrays with at least
# ELEMENTS elements. In float32 the fused error is the same for all spellings of a meaning, and the
# program's depends on its order of summation: at a mean of 30 standard deviations they differ by up
# to 2.6.
RATIO, ELEMENTS = {"bfloat16": 1.2, "float16": 1.2, "float32": 2.7}, 1000

# Spellings whose errors show a second rounding of a normalised array's gradient (1.3 to 2.4 times
# those of the unfused program), and their targets. A pass computes the moments of the first,
# calls of the convolutions those of the others.
ROUNDED_ONCE = [
    (ALL["instance norm, (N, C, -1); jax.nn.silu; float16 NHWC"], "sm_90a"),
    (Spelling("epsilon outside", "z + (a * scale + shift)", "gelu", dtype="float16"), ""),
    (Spelling("no gain, no offset", "z + projection", "log1p(exp(y))", dtype="float16"), ""),
]

# XLA rounds where the program does. Otherwise XLA:CPU keeps a 16-bit convolution's result in
# float32 for batch norm, which no GPU does.
AS_WRITTEN = {"xla_allow_excess_precision": False}

# The numbers of draws whose errors are averaged. With one draw the ratio of two correct programs
# varies by a third, because only 16 channels contribute roundings of means and variances. If the
# first number does not suffice, the second decides.
DRAWS = (6, 40)

# Mean over standard deviation of the first convolution's results.
RATIOS = (1.0, 30.0, 1000.0)


def pytest_generate_tests(metafunc):
    """The spellings of this run; growing seeds go through all of them.

    Those of GPUs are the same in every run, because the record of the GPU names them.
    """
    counts = {"traced": TRACED, "computed": COMPUTED, "compiled": TRACED}
    for fixture, count in counts.items():
        if fixture not in metafunc.fixturenames:
            continue
        chosen = list(ALL)
        seed = 0 if fixture == "compiled" else metafunc.config.getoption("seed")
        order = np.random.default_rng(0).permutation(len(chosen))
        names = [chosen[i] for i in np.roll(order, -seed * count)]
        if not metafunc.config.getoption("slow"):
            names = names[:count]
        metafunc.parametrize(fixture, names)


def spelled(name: str) -> Spelling:
    """The spelling of this name; skips the test if its library is not installed."""
    if library := ALL[name].missing:
        pytest.skip(f"{library} is not installed")
    return ALL[name]


# --- the list itself ---


def test_spellings_are_many_and_their_names_differ():
    kinds = collections.Counter(s.meaning.norm for s in ALL.values())
    assert kinds["batch"] >= 60 and kinds["instance"] >= 5 and kinds[f"group {GROUPS}"]
    assert len(set(ALL.values())) == len(ALL)
    assert {s.dtype for s in ALL.values()} == set(spellings.DTYPES)
    assert {s.layout for s in ALL.values()} == {"NHWC", "NCHW"}
    for fields in (spellings.ACTIVATIONS, spellings.SHORTCUTS, spellings.SQUEEZES):
        words = {word for s in ALL.values() for word in (s.activation, s.shortcut, s.squeeze)}
        assert set(fields) <= words


def test_a_canonical_spelling_has_the_meaning_that_it_stands_for():
    for spelling in [*ALL.values(), *(spellings.drawn(0, i) for i in range(100))]:
        assert canonical(spelling.meaning).meaning == spelling.meaning


# --- calls ---


@functools.cache
def found(spelling: Spelling, order: str, target: str) -> spelling_calls.Found:
    return spelling_calls.found(spelling, order, jaxconv.fuse, target)


def assert_same_calls(spelling: Spelling, order: str, target: str) -> None:
    """The calls equal those of the canonical spelling, and by primitive those of its kind.

    Under ``jax.checkpoint``, a derivative that needs the result computes it again, and one that
    needs the operand does not, so kinds differ.
    """
    actual = found(spelling, order, target)
    models = [(canonical(spelling.meaning), True), (canonical_of_kind(spelling), False)]
    for model, forms in models[: 1 if spelling.remat else 2]:
        said = spelling_calls.complaint(actual, found(model, order, target), forms)
        known = "-1 masked_sums, +2 sums" if spelling.name in BY_XLA and not forms else ""
        assert said == known, f"{spelling.name}, {order}, {target}: {said}, beside {model.name}"


def canonical_of_kind(spelling: Spelling) -> Spelling:
    """The canonical spelling with the first activation that kernels compute like this one."""
    kernel = spellings.ACTIVATIONS[spelling.activation].kernel
    first = next(a for a in spellings.ACTIVATIONS.values() if a.kernel == kernel)
    return canonical(spelling.meaning._replace(activation=first.function))


@pytest.mark.parametrize("order", ORDERS)
def test_calls(traced, order, native_cpu):
    for target in TARGETS:
        assert_same_calls(spelled(traced), order, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", spellings.DTYPES)
@pytest.mark.parametrize("shortcut", ["none", "z + a"])
@pytest.mark.parametrize("norm", ["batch", f"group {GROUPS}"])
def test_two_layers_consist_of_calls(norm, shortcut, dtype, target, native_cpu):
    """Moments of both norms come from calls (batch norm: of convolutions where kernels can).

    Calls compute the sums over activations in the first norm's backward pass. The gradient of the
    second norm is a vector for each example: its two sums read no array but y and may be left to
    XLA, like the head's mean. In float32 the derivative of moments sums deviations once more.
    """
    meaning = Spelling(activation="jax.nn.silu", shortcut=shortcut, dtype=dtype).meaning
    spelling = canonical(meaning._replace(norm=norm))
    both = [found(spelling, order, target) for order in ORDERS]
    counted = [spelling_calls.names(each.calls) for each in both]
    assert counted[0] == counted[1]
    moments = counted[0]["jaxconv_moments"]
    if norm == "batch":
        moments += sum(n for call, n in both[0].calls.items() if "statistics=True" in call)
    assert (moments, counted[0]["jaxconv_normalise"]) == (2, 2), counted[0]
    most = 5 if dtype == "float32" else 3
    assert counted[0]["jaxconv_masked_sums"] >= 1 and both[0].sums <= most, both[0]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(RANDOM))
def test_calls_of_random_spellings(index, seed, native_cpu):
    spelling = spellings.drawn(seed, index)
    for order in ORDERS:
        for target in TARGETS:
            assert_same_calls(spelling, order, target)


@pytest.mark.parametrize("order", ORDERS)
def test_custom_calls_of_a_program_for_gpus(traced, order):
    """Lowers for an H100 if the CUDA kernels are installed; no GPU need be present."""
    kernels = native.load("cuda")
    if isinstance(kernels, native.Refusal):
        pytest.skip(f"no CUDA kernels: {kernels.reason}")
    spelling = spelled(traced)
    actual, expected = (
        spelling_calls.lowered_calls(each, order, jaxconv.fuse, TARGETS[1])
        for each in (spelling, canonical(spelling.meaning))
    )
    assert not spelling_calls.difference(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
def test_a_compiled_program_moves_the_canonical_bytes(compiled, order):
    """In the program that XLA makes for this GPU, our calls and XLA's own kernels included."""
    spelling = spelled(compiled)
    model = canonical(spelling.meaning)
    with jax.default_device(jax.devices("gpu")[0]):
        actual, expected = (
            spelling_calls.moved_bytes(each, order, jaxconv.fuse) for each in (spelling, model)
        )
    assert actual <= (1 + spellings.TOLERANCE) * expected


# --- results ---


def results(spelling: Spelling, fuse=None, order: str = "outside"):
    """Compiles a function of (parameters, input) that returns results and gradients as a list."""
    function = spelling_calls.gradient(spelling, order, fuse, argnums=(0, 1), has_aux=True)
    return jax.jit(lambda p, x: jax.tree.leaves(function(p, x)), compiler_options=AS_WRITTEN)


@functools.cache
def exact(spelling: Spelling):
    """The same in float64; for libraries that compute in float32, the canonical spelling."""
    model = spelling if spelling.exact else canonical(spelling.meaning)
    return results(dataclasses.replace(model, dtype="float64"))


def errors(actual, of_float64) -> np.ndarray:
    """For arrays that are large enough, the norm of the error over the norm of the array."""
    wide = [np.asarray(a).astype(np.float64) for a in actual]
    relative = [
        np.linalg.norm(a - e) / np.linalg.norm(e)
        for a, e in zip(wide, of_float64, strict=True)
        if e.size >= ELEMENTS
    ]
    return np.asarray(relative)


def assert_as_exact(spelling: Spelling, target: str) -> None:
    """Compares root mean squares of several draws' errors; one compilation serves all draws."""
    programs = {"unfused": results(spelling)}
    programs |= {order: results(spelling, jaxconv.fuse, order) for order in ORDERS}
    with spelling_calls.target(target):
        for function in programs.values():
            function(*spelling.values())
    for ratio in RATIOS:
        complaints = []
        squares = dict.fromkeys(programs, 0.0)
        for begin, end in itertools.pairwise((0, *DRAWS)):
            for seed in range(begin, end):
                p, x = spelling.values(ratio, seed)
                with jax.enable_x64(True):
                    wide = spelling.values(ratio, seed, dtype="float64")
                    of_float64 = [np.asarray(e) for e in exact(spelling)(*wide)]
                for name, function in programs.items():
                    squares[name] += errors(function(p, x), of_float64) ** 2
            complaints = exceeding({n: np.sqrt(s / end) for n, s in squares.items()}, spelling)
            if not complaints:
                break
        assert not complaints, f"{spelling.name}, mean / std {ratio}: {'; '.join(complaints)}"


def exceeding(mean: dict[str, np.ndarray], spelling: Spelling) -> list[str]:
    """The errors of fused programs that are too large, from each program's mean errors."""
    theirs = mean["unfused"]
    allowed = RATIO[spelling.dtype] * theirs + float(jax.numpy.finfo(spelling.dtype).eps)
    return [
        f"{order}, array {at}: {mean[order][at]:.3g}, unfused {theirs[at]:.3g}"
        for order in ORDERS
        for at in np.flatnonzero(~(mean[order] <= allowed))
        if theirs[at] < 0.5  # others have no correct digit, or overflow
    ]


def test_results_are_as_exact(computed, native_cpu):
    assert_as_exact(spelled(computed), TARGETS[list(ALL).index(computed) % 2])


@pytest.mark.parametrize("spelling, target", ROUNDED_ONCE)
def test_gradients_of_a_normalised_array_are_rounded_once(spelling, target, native_cpu):
    assert_as_exact(spelling, target)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(RANDOM))
def test_results_of_random_spellings(index, seed, native_cpu):
    assert_as_exact(spellings.drawn(seed, index), TARGETS[index % 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_spelling_means_what_its_meaning_says(name):
    """It computes the same as the canonical spelling: in float64, or float32 for some libraries."""
    spelling = spelled(name)
    if spelling.parts in spellings.OTHER_VALUES:
        pytest.skip("other coefficients, by the same operations")
    dtype = "float64" if spelling.exact else "float32"
    with jax.enable_x64(spelling.exact):
        values = spelling.values(dtype=dtype)
        actual, expected = (
            np.asarray(jax.jit(dataclasses.replace(each, dtype=dtype).features)(*values))
            for each in (spelling, canonical(spelling.meaning))
        )
    assert np.abs(actual - expected).max() <= (1e-9, 1e-5)[not spelling.exact] * expected.max()
