"""The choice between a kernel and XLA: "auto" by predicted times, "native" unless all refuse."""

from __future__ import annotations

import functools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import assert_exact

import jaxconv
from jaxconv._src.call import record
from jaxconv._src.library import native

NHWC = ("NHWC", "HWIO", "NHWC")
FASTER = 'predicted 2.0 us, {} 5.0 us; algorithm="native" takes the kernel'


class Predicting:
    """The CPU platform, with predicted times and refusals that a test sets."""

    def __init__(self, kernels: native.Platform, xla_microseconds: float):
        self.kernels, self.module, self.arrays = kernels, kernels.module, kernels.arrays
        self.xla_microseconds = xla_microseconds
        self.refuses = lambda line: ""
        self.asked: list[tuple[str, str]] = []

    def select(self, line: str, algorithm: str, target: str) -> native.Selection:
        self.asked.append((line, algorithm))
        if reason := self.refuses(line):
            return native.Selection(None, refusals=(native.Refusal("kernel", reason),))
        named = algorithm not in ("auto", "native")
        chosen = self.kernels.select(line, algorithm if named else "native", target)
        if not chosen.instance:
            return chosen
        predicted = dict(microseconds=5.0, xla_microseconds=self.xla_microseconds)
        if algorithm == "auto" and 0 < self.xla_microseconds < 5:
            refusal = native.Refusal("xla", FASTER.format(chosen.instance))
            return native.Selection(None, refusals=(refusal,), **predicted)
        return chosen._replace(refusals=(), **predicted)


@pytest.fixture
def predicting(native_cpu, monkeypatch):
    """Predicts 2 us for XLA's convolution, and 5 us for every kernel."""
    platform = Predicting(native_cpu, 2.0)
    monkeypatch.setattr(native, "load", lambda name: platform)
    monkeypatch.setenv("JAXCONV_ALGORITHM", "auto")
    with jax.default_device(jax.devices("cpu")[0]):
        yield platform
    jaxconv.uninstall()


def integers(seed: int, *shapes) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]


def lax_conv(x, w, stride=1):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=NHWC)


def with_gradients(f):
    def run(x, w):
        y, vjp = jax.vjp(f, x, w)
        return y, *vjp(jnp.sign(y))

    return run


def calls(f, *arguments) -> list[str]:
    """The operations of the library's custom calls in the lowered program."""
    # A new function each time, because JAX's cache keys do not contain the prediction.
    text = jax.jit(lambda *a: f(*a)).lower(*arguments).as_text()
    return sorted(
        op for op in ("dgrad", "fprop", "wgrad") for _ in range(text.count(f"@jaxconv_{op}"))
    )


X, W = integers(0, (2, 8, 8, 4), (3, 3, 4, 6))


def test_auto_leaves_to_xla_what_it_predicts_to_be_faster(predicting):
    step = with_gradients(functools.partial(jaxconv.conv, stride=2))
    assert calls(step, X, W) == []
    found = jaxconv.explain(step, X, W).convolutions
    assert [c.op for c in found] == ["fprop", "wgrad", "dgrad"]
    for c in found:
        assert c.instance is None and (c.microseconds, c.xla_microseconds) == (5.0, 2.0)
        (refusal,) = c.refusals
        assert refusal.kernel == "xla" and refusal.reason.startswith("predicted 2.0 us, ")
    text = str(jaxconv.explain(step, X, W))
    assert "0 of 3" in text and "  1  xla: predicted 2.0 us, fprop_onednn_f32 5.0 us" in text
    predicting.xla_microseconds = 9.0
    assert calls(step, X, W) == ["dgrad", "fprop", "wgrad"]
    (c, *_) = jaxconv.explain(step, X, W).convolutions
    assert (c.microseconds, c.xla_microseconds, c.refusals) == (5.0, 9.0, ())


def test_small_pointwise_convolutions_on_cpus_are_xlas(native_cpu, monkeypatch):
    monkeypatch.delenv("JAXCONV_ALGORITHM")
    with jax.default_device(jax.devices("cpu")[0]):
        x, w = integers(0, (4, 8, 8, 16), (1, 1, 16, 16))
        (c,) = jaxconv.explain(lambda x, w: jaxconv.conv(x, w), x, w)
        assert c.instance is None and 0 < c.xla_microseconds < c.microseconds
        assert 'algorithm="native" takes the kernel' in c.refusals[0].reason
        for algorithm in ("native", "onednn"):
            conv = functools.partial(jaxconv.conv, algorithm=algorithm)
            assert jaxconv.explain(conv, x, w)[0].instance == "fprop_onednn_f32"
        with jaxconv.override():
            assert jaxconv.explain(lambda x, w: lax_conv(x, w), x, w)[0].instance is None
        assert jaxconv.explain(jaxconv.conv, x, np.repeat(w, 3, 0))[0].instance
        assert jaxconv.explain(jaxconv.conv, np.repeat(x, 2, 0), np.repeat(w, 2, 3))[0].instance


def test_native_takes_the_kernel(predicting):
    def conv(algorithm):
        return with_gradients(functools.partial(jaxconv.conv, stride=2, algorithm=algorithm))

    assert calls(conv("native"), X, W) == ["dgrad", "fprop", "wgrad"]
    assert calls(conv({"fprop": "native"}), X, W) == ["fprop"], "the others are auto"
    assert calls(conv({"dgrad": "native", "wgrad": "xla"}), X, W) == ["dgrad"]
    (c, *_) = jaxconv.explain(conv("native"), X, W).convolutions
    assert c.instance and (c.microseconds, c.xla_microseconds) == (5.0, 2.0)
    for a, b in zip(conv("native")(X, W), conv("auto")(X, W), strict=True):
        assert_exact(a, b, "native and auto")
    general = functools.partial(
        jaxconv.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=NHWC,
        algorithm="native",
    )
    transposed = functools.partial(
        jaxconv.conv_transpose, strides=(2, 2), padding="SAME", algorithm="native"
    )
    assert calls(general, X, W) == ["fprop"] and calls(transposed, X, W) == ["dgrad"]


def test_native_goes_to_xla_where_every_kernel_refuses(predicting):
    predicting.refuses = lambda line: "a reason"
    conv = functools.partial(jaxconv.conv, algorithm="native")
    (c,) = jaxconv.explain(conv, X, W).convolutions
    assert c.instance is None and c.refusals == (("kernel", "a reason"),)
    assert (c.microseconds, c.xla_microseconds) == (0.0, 0.0)
    assert jax.jit(conv)(X, W).shape == (2, 8, 8, 6)


def test_under_lax_auto_leaves_the_whole_convolution_to_lax(predicting):
    """``override`` tries no other canonical form and dilates no input beforehand."""

    def transposed(x, w):
        return lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=NHWC)

    for f in (lax_conv, transposed):
        plain = jax.jit(f).lower(X, W).as_text()
        with jaxconv.override():
            predicting.asked.clear()
            assert jax.jit(f).lower(X, W).as_text() == plain
            assert len(predicting.asked) == 1
            (c,) = jaxconv.explain(f, X, W).convolutions
        assert c.instance is None and c.refusals[0].kernel == "xla"
        assert (c.microseconds, c.xla_microseconds) == (5.0, 2.0)


def test_a_refused_form_is_not_a_slower_one(predicting):
    """If the first canonical form is refused, the next one is tried, and its prediction counts."""
    first = "fprop"
    predicting.refuses = lambda line: "refused" if line.startswith(first) else ""
    with jaxconv.override():
        assert calls(lax_conv, X, W) == []
        (c,) = jaxconv.explain(lax_conv, X, W).convolutions
    assert c.refusals[0].kernel == "xla" and "dgrad" in c.refusals[0].reason
    assert c.op == "dgrad" and c.problem.startswith("dgrad ")
    with jaxconv.override(algorithm="native"):
        assert calls(lax_conv, X, W) == ["dgrad"]


def test_an_input_dilated_beforehand_is_weighed_too(predicting):
    predicting.refuses = lambda line: "" if " l1x1 " in line else "dilated input"

    def both(f):
        return f(X, W, (2, 2), ((1, 2), (1, 0)), (2, 2), dimension_numbers=NHWC)

    expected = both(lax.conv_general_dilated)
    for algorithm, op in (("auto", []), ("native", ["fprop"])):
        ours = functools.partial(jaxconv.conv_general_dilated, algorithm=algorithm)
        assert calls(lambda: both(ours)) == op  # noqa: B023
        (c,) = jaxconv.explain(lambda: both(ours)).convolutions  # noqa: B023
        assert c.microseconds == 5.0 and bool(c.instance) == bool(op)
        assert_exact(both(ours), expected, algorithm)
        with jaxconv.override(algorithm=algorithm):
            assert len(calls(lambda: both(lax.conv_general_dilated))) == len(op)


@jax.jit
def compiled_before(x, w):
    return lax_conv(x, w)


def taken(f=compiled_before) -> bool:
    return calls(f, X, W) == ["fprop"]


def test_install_and_override_take_an_algorithm(predicting):
    """The algorithm is part of JAX's cache keys, nests, and is set for one thread or for all."""

    def lowers() -> int:
        with record.recording() as found:
            compiled_before(X, W)
        return len(found)

    compiled_before(X, W)
    assert not taken()
    with jaxconv.override(algorithm="native"):
        assert taken() and lowers() == 1 and lowers() == 0
        with jaxconv.override():
            assert not taken() and lowers() == 1 and lowers() == 0
            with jaxconv.override(algorithm="native"):
                assert taken() and lowers() == 0
        with jaxconv.override(False, algorithm="native"):
            assert not taken() and lowers() == 0
        assert taken()
    jaxconv.install(algorithm="native")
    found = []
    thread = threading.Thread(target=lambda: found.append(taken()))
    thread.start()
    thread.join()
    assert taken() and found == [True]
    with jaxconv.override(False):
        assert not taken()
    jaxconv.install()
    assert not taken(), "the last call counts"
    jaxconv.uninstall()
    assert not taken()


@pytest.mark.parametrize("algorithm", ["fastest", None, {"backward": "auto"}])
def test_unknown_algorithms_are_refused(algorithm):
    with pytest.raises((TypeError, ValueError), match=r"^algorithm: "):
        jaxconv.install(algorithm=algorithm)
    if algorithm is None:
        return  # override's default
    with (
        pytest.raises((TypeError, ValueError), match=r"^algorithm: "),
        jaxconv.override(algorithm=algorithm),
    ):
        pass


def test_the_library_knows_native(platform, native_kernels):
    """With "native" the library takes a kernel if it has one, whatever it predicts for XLA."""
    key = "fprop f32:f32:f32 highest b1 n2 g1 c4 k6 i8x8 f3x3 o8x8 s1x1 l1x1 d1x1 p1_1x1_1"
    chosen = native_kernels.select(key, "native", "")
    assert chosen.instance in native_kernels.kernels()
    conv = functools.partial(jaxconv.conv, algorithm="native", precision="highest")
    (c,) = jaxconv.explain(conv, X, W).convolutions
    assert c.instance == chosen.instance


# --- the library's own answer ---------------------------------------------------------------------


def platform_answering(answer) -> native.Platform:
    platform = object.__new__(native.Platform)
    platform.module = types.SimpleNamespace(select=answer)
    return platform


def test_the_six_parts_of_an_answer():
    refusals = [("xla", "predicted 3.0 us, fprop_a 4.0 us")]
    left = platform_answering(lambda *_: ("", 0, 1, 4.0, 3.0, refusals)).select("a", "auto", "")
    assert left == native.Selection(None, 0, 1, (native.Refusal(*refusals[0]),), 4.0, 3.0)
    assert left.xla_is_faster
    kept = platform_answering(lambda *_: ("fprop_a", 64, 2, 4.0, 0.0, [])).select("a", "auto", "")
    assert kept == native.Selection("fprop_a", 64, 2, (), 4.0, 0.0) and not kept.xla_is_faster
    refused = platform_answering(lambda *_: ("", 0, 1, 0.0, 0.0, [("a", "why")]))
    assert not refused.select("a", "auto", "").xla_is_faster


def test_a_problem_that_the_library_cannot_read_is_xla_s(predicting):
    """A stride is too large for the kernels' keys. A named algorithm is refused with the reason."""

    def select(line, algorithm, target):
        raise ValueError("stride: expected less than 2147483648")

    predicting.select = select
    step = with_gradients(jaxconv.conv)
    for a, b in zip(jax.jit(step)(X, W), with_gradients(lax_conv)(X, W), strict=True):
        assert_exact(a, b, "left to XLA")
    assert "stride: expected less than 2147483648" in str(jaxconv.explain(step, X, W))
    for algorithm in ("auto", "native"):
        with jaxconv.override(algorithm=algorithm):
            assert_exact(jax.jit(lax_conv)(X, W), lax_conv(X, W), "left to lax")
            (c,) = jaxconv.explain(lax_conv, X, W).convolutions
        assert c.refusals == (("jaxconv", "stride: expected less than 2147483648"),)
    with pytest.raises(ValueError, match=r"'onednn' cannot serve .* stride: expected less than"):
        jaxconv.conv(X, W, algorithm="onednn")


def test_the_environment_says_what_auto_means(predicting, monkeypatch):
    x, w = integers(0, (1, 8, 8, 8), (3, 3, 8, 8))

    def instance():
        (c,) = jaxconv.explain(lambda x, w: jaxconv.conv(x, w), x, w).convolutions
        return c.instance

    assert instance() is None
    monkeypatch.setenv("JAXCONV_ALGORITHM", "native")
    jax.clear_caches()  # as in a process that starts with this value
    assert instance() is not None
    monkeypatch.setenv("JAXCONV_ALGORITHM", "fastest")
    with pytest.raises(ValueError, match="JAXCONV_ALGORITHM: expected 'auto' or 'native'"):
        native.automatic()
