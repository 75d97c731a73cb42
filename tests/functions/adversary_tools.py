"""The cases of ``adversary.py`` for explain, override, install, export and the bench."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from adversary import Answer, Case, Refused
from adversary_inputs import NHWC, kind, value
from adversary_int8 import WF, XF
from jax import lax

import jaxconv
import jaxconv.bench.__main__ as bench

# --- explain, override, install, export -----------------------------------------------------------


def plain(x: Any, w: Any) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)


def on_kernels(*arguments: Any, **options: Any) -> int:
    return jaxconv.explain(plain, *arguments, **options).on_kernels


def under(*arguments: Any, **options: Any) -> int:
    with jaxconv.override(*arguments, **options):
        return on_kernels(XF, WF)


def installed(*arguments: Any, **options: Any) -> int:
    try:
        jaxconv.install(*arguments, **options)
        return on_kernels(XF, WF)
    finally:
        jaxconv.uninstall()


def is_one() -> Answer:
    return Answer(lambda: 1)


def is_none() -> Answer:
    return Answer(lambda: 0)


def tool_cases() -> Iterator[Case]:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (XF, WF)]
    cases: dict[str, tuple[Callable[[], Any], Any]] = {
        "explain/no arguments": (lambda: jaxconv.explain(plain), kind("missing", "'x'")),
        "explain/not a function": (lambda: jaxconv.explain(3), kind("fun", "function", "3")),
        "explain/a result for a function": (
            lambda: jaxconv.explain(plain(XF, WF)),
            kind("fun", "function", "array of shape"),
        ),
        "explain/a dict": (lambda: jaxconv.explain({"a": "b" * 1000}), kind("got {'a': ")),
        "explain/a traced function": (
            lambda: jaxconv.explain(jax.jit(plain).trace(XF, WF), XF),
            kind("fun", "JAX has traced already", "explain(f, x)"),
        ),
        "explain/a compiled function": (
            lambda: jaxconv.explain(jax.jit(plain).lower(XF, WF).compile(), XF, WF),
            kind("fun", "compiled", "explain(f, x)"),
        ),
        "explain/a lowered function": (
            lambda: jaxconv.explain(jax.jit(plain).lower(XF, WF)),
            kind("fun", "lowered", "explain(f, x)"),
        ),
        "explain/an exported function": (
            lambda: jaxconv.explain(jax.export.export(jax.jit(plain))(XF, WF), XF, WF),
            kind("fun", "exported", "explain(f, x)"),
        ),
        "explain/wide": (
            lambda: "workspace MB" in str(jaxconv.explain(plain, XF, WF, wide=True)),
            Answer(lambda: True),
        ),
        "explain/text": (
            lambda: jaxconv.explain(plain, "a", WF),
            Refused((TypeError, AttributeError), ("str",)),
        ),
        "explain/tpu": (lambda: on_kernels(XF, WF, platform="tpu"), value("platform", "'tpu'")),
        "explain/gpu": (
            lambda: on_kernels(XF, WF, platform="gpu"),
            value("platform", "'cuda'", "'gpu'"),
        ),
        "explain/a platform that is none": (
            lambda: on_kernels(XF, WF, platform=3),
            value("platform", "3"),
        ),
        "explain/no convolutions": (
            lambda: str(jaxconv.explain(lambda: 1)),
            Answer(lambda: "no convolutions"),
        ),
        "explain/shapes": (lambda: on_kernels(*shapes), is_none()),
        "explain/a function that raises": (
            lambda: jaxconv.explain(lambda x: 1 / 0, XF),
            Refused(ZeroDivisionError, ("division",)),
        ),
        "explain/a shape that does not fit": (
            lambda: jaxconv.explain(jaxconv.conv, shapes[0], shapes[0]),
            value("w", "input channels"),
        ),
        "explain/an unknown keyword": (lambda: jaxconv.explain(plain, XF, w=WF, q=1), kind("'q'")),
        "override/a list": (lambda: under([1]), kind("enabled", "[1]")),
        "override/an algorithm by position": (
            lambda: under("native"),
            kind("enabled", "algorithm='native'"),
        ),
        "override/None": (lambda: under(None), is_one()),
        "override/no algorithm": (lambda: under(algorithm=None), is_one()),
        "override/an unknown algorithm": (
            lambda: under(algorithm="cudnn"),
            value("algorithm", "'cudnn'"),
        ),
        "override/an unknown keyword": (lambda: under(algorithms="native"), kind("algorithms")),
        "override/0": (lambda: under(0), kind("enabled", "0")),
        "override/NumPy's False": (lambda: under(np.False_), is_none()),
        "override/True": (lambda: under(True), is_one()),
        "override/a family": (lambda: under(algorithm="onednn"), is_one()),
        "override/one that does not take it": (lambda: under(algorithm="winograd_f4x3"), is_one()),
        "override/xla": (lambda: under(algorithm="xla"), is_none()),
        "override/left by an error": (left_by_an_error, is_none()),
        "override/entered twice": (entered_twice, is_one()),
        "override/a function decorated": (lambda: decorated(jaxconv.override()), is_one()),
        "override/a function decorated without a call": (
            lambda: decorated(jaxconv.override),
            is_one(),
        ),
        "override/a class": (lambda: jaxconv.override(int), kind("enabled", "int")),
        "install/by position": (
            lambda: installed("native"),
            kind("install", "algorithm='native'"),
        ),
        "install/True": (lambda: installed(True), kind("install() does it")),
        "install/False": (lambda: installed(False), kind("jaxconv.uninstall() undoes it")),
        "install/a function": (lambda: installed(plain), kind("jaxconv.override")),
        "install/no algorithm": (lambda: installed(algorithm=None), kind("algorithm", "None")),
        "install/an unknown algorithm": (
            lambda: installed(algorithm="AUTO"),
            value("algorithm", "'AUTO'"),
        ),
        "install/twice": (lambda: [jaxconv.install(), installed()][1], is_one()),
        "install/an override inside": (lambda: installed() - under(False), is_one()),
        "uninstall/without install": (
            lambda: [jaxconv.uninstall(), on_kernels(XF, WF)][1],
            is_none(),
        ),
        "uninstall/by position": (lambda: jaxconv.uninstall(True), kind("positional")),
        "installed/with nothing installed": (jaxconv.installed, Answer(lambda: None)),
        "installed/in a traced override": (installed_in_a_trace, Answer(lambda: ["xla"] * 3)),
        "installed/by position": (lambda: jaxconv.installed(True), kind("positional")),
        "kernels/of another platform": (lambda: jaxconv.kernels("tpu"), value("platform", "'tpu'")),
        "register/by position": (lambda: jaxconv.register("cpu"), kind("positional")),
        "register/twice": (
            lambda: [jaxconv.register(), jaxconv.register()][1]["cpu"],
            Answer(lambda: ""),
        ),
        "export/without disabled checks": (
            lambda: jax.export.export(jax.jit(jaxconv.conv))(XF, WF).serialize(),
            value("jaxconv_fprop", "compatibility"),
        ),
        "export/for a platform without kernels": (
            lambda: jax.export.export(jax.jit(jaxconv.conv), platforms=["tpu"])(XF, WF).platforms,
            Answer(lambda: ("tpu",)),
        ),
        "export/and call": (exported, Answer(lambda: jaxconv.conv(XF, WF))),
        "checkpoint_policies/of a convolution": (checkpointed, Answer(lambda: True)),
        "names/of a function that is none": (
            lambda: jaxconv.convolve,
            Refused(AttributeError, ("convolve",)),
        ),
    }
    for name, (run, expected) in cases.items():
        yield Case(name, run, expected)
    yield from bench_cases()


def installed_in_a_trace() -> list[str]:
    found = []

    @jax.jit
    def f(x):
        with jaxconv.override(algorithm="xla"):
            found.extend((jaxconv.installed() or {}).values())
        return x

    f(1.0)
    return found


def left_by_an_error() -> int:
    with contextlib.suppress(ZeroDivisionError), jaxconv.override():
        1 / 0  # noqa: B018
    return on_kernels(XF, WF)


def entered_twice() -> int:
    with jaxconv.override(False), jaxconv.override(), jaxconv.override():
        return on_kernels(XF, WF)


def decorated(decorator: Callable) -> int:
    @decorator
    def counted() -> int:
        return on_kernels(XF, WF)

    return counted()


def exported() -> jax.Array:
    checks = jaxconv.export.disabled_checks()
    program = jax.export.export(jax.jit(jaxconv.conv), disabled_checks=checks)(XF, WF)
    return jax.export.deserialize(program.serialize()).call(XF, WF)


def checkpointed() -> bool:
    policy = jaxconv.checkpoint_policies.convs_saveable
    f = jax.checkpoint(lambda x: jnp.sum(jaxconv.conv(x, WF) ** 2), policy=policy)
    return bool(jnp.isfinite(jax.jit(jax.grad(f))(XF)).all())


# --- the bench ------------------------------------------------------------------------------------


def run_bench(*arguments: str) -> None:
    """Runs the bench. If it ends the program, raises its output on stderr."""
    said = io.StringIO()
    cached = jax.config.jax_enable_compilation_cache
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            bench.main(arguments)
    except SystemExit as end:
        raise SystemExit(f"{end.code}: {said.getvalue()}") from end
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)


def bench_cases() -> Iterator[Case]:
    folder = tempfile.gettempdir()
    refused = {
        "--layer x": ["--layer", "x"],
        "--layer of zero channels": ["--layer", "n1 c0 k1 i4x4 f1x1"],
        "--layer of an even stride of zero": ["--layer", "n1 c4 k4 i4x4 f1x1 s0"],
        "--dtype f8": ["--dtype", "f8"],
        "--op backward": ["--op", "backward"],
        "--set none": ["--set", "none"],
        "--precision exact": ["--precision", "exact"],
        "--reps 0": ["--reps", "0"],
        "--reps many": ["--reps", "many"],
        "--batch -1": ["--batch", "-1"],
        "--seconds -1": ["--seconds", "-1"],
        "--seconds nan": ["--seconds", "nan"],
        "--seed x": ["--seed", "x"],
        "--random 0": ["--random", "0"],
        "--peer numpy": ["--peer", "numpy"],
        "--plot x.txt": ["--plot", "x.txt"],
        "--plot in no folder": ["--plot", "/no/such/folder/x.png"],
        "--json a folder": ["--json", folder],
        "--json in a file": ["--json", os.path.join(sys.executable, "x.json")],
        "--device-time without a GPU": ["--device-time"],
        "--name of no layer": ["--name", "no such layer"],
        "--algorithm cudnn": ["--algorithm", "cudnn", "--layer", "1,4,4,4,4,1,1,1,0"],
        "--network none": ["--network", "none"],
        "--unknown": ["--unknown"],
    }
    for name, arguments in refused.items():
        word = next((a for a in arguments if a.startswith("--")), "")
        if name in ("--name of no layer",):
            word = "no layer"
        yield Case(
            f"bench/{name}",
            functools.partial(run_bench, *arguments),
            Refused(SystemExit, ("2: ", word)),
        )
    yield Case("bench/--list", lambda: run_bench("--list"), Answer(lambda: None))
