"""The cases of ``adversary.py`` for int8, explain, override, install, export and the bench."""

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
from jax import lax

import jaxconv
import jaxconv.bench.__main__ as bench
from jaxconv import int8

RNG = np.random.default_rng(1)
X, W = (RNG.integers(-3, 4, s).astype(np.int8) for s in ((2, 5, 6, 64), (3, 3, 64, 32)))
X4, W4 = X[..., :4].copy(), W[:, :, :4].copy()
SCALE = np.linspace(0.01, 0.02, 32, dtype=np.float32)
NHWC = ("NHWC", "HWIO", "NHWC")


def value(*words: str) -> Refused:
    return Refused(ValueError, words)


def kind(*words: str) -> Refused:
    return Refused(TypeError, words)


def sums(x: Any, w: Any, padding: Any = "SAME") -> np.ndarray:
    """The exact sums, by lax in int32."""
    options = dict(dimension_numbers=NHWC, preferred_element_type=jnp.int32)
    x, w = jnp.asarray(x, jnp.int32), jnp.asarray(w, jnp.int32)
    return lax.conv_general_dilated(x, w, (1, 1), padding, **options)


def int8_cases() -> Iterator[Case]:
    def call(x: Any = X, w: Any = W, scale: Any = SCALE, **options: Any) -> Callable[[], Any]:
        return lambda: int8.conv(
            x() if callable(x) else x, w() if callable(w) else w, scale, **options
        )

    packed = lambda: int8.pack(X)  # noqa: E731
    packed_filter = lambda: int8.pack_filter(W, data_format="NHWC")  # noqa: E731
    cases: dict[str, tuple[Callable[[], Any], Any]] = {
        "x: float32": (call(X.astype(np.float32)), kind("x", "int8 or uint8", "float32")),
        "x: None": (call(None), kind("x", "None")),
        "x: text": (call("abc"), kind("x", "abc")),
        "x: a filter": (call(packed_filter), kind("x", "PackedFilter")),
        "x: a vector": (call(X[0, 0, 0]), value("x", "(64,)")),
        "x: a shape": (call(jax.ShapeDtypeStruct(X.shape, X.dtype)), kind("x", "ShapeDtypeStruct")),
        "w: float32": (call(w=W.astype(np.float32)), kind("w", "int8", "float32")),
        "w: uint8": (call(w=W.astype(np.uint8)), kind("w", "int8", "uint8")),
        "w: images": (call(w=packed), kind("w", "Packed")),
        "w: None": (call(w=None), kind("w", "None")),
        "w: of other channels": (call(w=W[:, :, :32]), value("w")),
        "w: packed for NHWC": (call(packed, packed_filter), value("w", "NCHW32")),
        "scale: of another length": (call(scale=SCALE[:5]), value("scale", "(5,)")),
        "scale: a matrix of another batch": (
            call(scale=np.ones((3, 32), "f")),
            value("scale", "(3, 32)"),
        ),
        "scale: NaN": (call(scale=np.nan), value("scale", "finite")),
        "scale: infinite": (call(scale=SCALE * np.inf), value("scale", "finite")),
        "scale: text": (call(scale="1"), kind("scale", "'1'")),
        "scale: complex": (call(scale=1j), kind("scale", "complex")),
        "bias: without a scale": (call(scale=None, bias=SCALE), value("bias", "scale")),
        "bias: a scalar": (call(bias=1.0), value("bias", "()")),
        "bias: NaN": (call(bias=SCALE * np.nan), value("bias", "finite")),
        "residual: of another shape": (call(residual=X), value("residual", "(2, 5, 6, 64)")),
        "residual: of another dtype": (
            call(residual=np.zeros((2, 5, 6, 32), np.float32)),
            kind("residual", "int8", "float32"),
        ),
        "activation: gelu": (call(activation="gelu"), value("activation", "'gelu'")),
        "activation: a function": (call(activation=jnp.sin), value("activation", "sin", "fuse")),
        "activation: of jax.nn": (
            call(activation=jax.nn.relu),
            Answer(lambda: int8.conv(X, W, SCALE, activation="relu")),
        ),
        "activation: in capitals": (
            call(activation="ReLU6"),
            Answer(lambda: int8.conv(X, W, SCALE, activation="relu6")),
        ),
        "strides": (call(strides=2), kind("strides", "'stride'")),
        "groups": (call(groups=2), kind("groups", "pack_filter")),
        "preferred_element_type": (call(preferred_element_type=np.int32), kind("'out_dtype'")),
        "no scale": (call(scale=None), value("scale", "out_dtype=jnp.int32")),
        "no scale, and int8": (
            call(scale=None, out_dtype=np.int8),
            Answer(lambda: np.asarray(sums(X, W)).astype(np.int8)),
        ),
        "out_dtype: int16": (call(out_dtype=np.int16), kind("out_dtype", "int16")),
        "out_dtype: nonsense": (call(out_dtype="f5"), kind("out_dtype", "f5")),
        "data_format: of three axes": (
            call(data_format="NDHWC"),
            value("data_format", "2 spatial"),
        ),
        "data_format: 3": (call(data_format=3), value("data_format", "3")),
        "data_format: in small letters": (
            lambda: int8.unpack(int8.conv(X, W, SCALE, data_format="nchw32")),
            Answer(lambda: int8.conv(X, W, SCALE)),
        ),
        "data_format: channels_first": (
            lambda: int8.conv(X.transpose(0, 3, 1, 2), W, SCALE, data_format="channels_first"),
            Answer(lambda: jnp.moveaxis(int8.conv(X, W, SCALE), -1, 1)),
        ),
        "layout": (call(layout="NHWC"), Answer(lambda: int8.conv(X, W, SCALE))),
        "layout: beside data_format": (
            call(layout="NHWC", data_format="NHWC"),
            kind("layout", "data_format"),
        ),
        "data_format: CHWN": (call(data_format="CHWN"), value("data_format", "'CHWN'")),
        "zero_point: 200": (call(zero_point=200), value("zero_point", "200")),
        "zero_point: 0.5": (call(zero_point=0.5), kind("zero_point", "0.5")),
        "zero_point: an array": (call(zero_point=np.zeros(3, int)), kind("zero_point")),
        "out_zero_point: of floats": (
            call(out_dtype=np.float32, out_zero_point=3),
            value("out_zero_point"),
        ),
        "stride: 0": (call(stride=0), value("stride", "at least 1")),
        "padding: CIRCULAR": (
            call(scale=None, out_dtype=np.int32, padding="CIRCULAR"),
            Answer(lambda: sums(np.pad(X, ((0, 0), (1, 1), (1, 1), (0, 0)), "wrap"), W, "VALID")),
        ),
        "padding: CAUSAL": (call(padding="CAUSAL"), value("padding", "one spatial axis")),
        "padding: FULL": (call(padding="FULL"), value("padding", "'CAUSAL'", "'FULL'")),
        "padding: crops all": (call(padding=-9), value("padding", "crops more")),
        "algorithm: None": (call(algorithm=None), kind("algorithm", "None")),
        "algorithm: imma_wgmma": (call(algorithm="imma_wgmma"), value("imma_wgmma")),
        "grad": (
            lambda: jax.grad(lambda s: jnp.sum(int8.conv(X, W, s, out_dtype=jnp.float32)))(SCALE),
            Refused((TypeError, NotImplementedError), ("fake_quant_conv",)),
        ),
        "sums": (call(scale=None, out_dtype=np.int32), Answer(lambda: sums(X, W))),
        "sums of packed images": (
            lambda: int8.unpack(
                int8.conv(packed(), int8.pack_filter(W, data_format="NCHW32"), out_dtype=np.int32)
            ),
            Answer(lambda: sums(X, W)),
        ),
        "an empty batch": (
            call(X[:0], scale=None, out_dtype=np.int32),
            Answer(lambda: np.zeros((0, 5, 6, 32), np.int32)),
        ),
        "a list": (call(X4.tolist(), W4, None), kind("x", "int8 or uint8", "int32")),
        "pack: float32": (lambda: int8.pack(X.astype("f")), kind("x", "float32")),
        "pack: a vector": (lambda: int8.pack(X[0, 0, 0]), value("x", "4 dimensions")),
        "pack: no channels": (lambda: int8.pack(X[..., :0]), value("x", "channel")),
        "pack: an unknown format": (lambda: int8.pack(X, "CHWN"), value("data_format", "'CHWN'")),
        "pack: a value of 300": (lambda: int8.pack(X, value=300), value("value", "300")),
        "unpack: an array": (lambda: int8.unpack(X), kind("packed", "Packed")),
        "unpack: of data with an axis less": (
            lambda: int8.unpack(int8.Packed(jnp.asarray(X), 64)),
            value("data", "(2, 5, 6, 64)"),
        ),
        "pack and unpack": (lambda: int8.unpack(int8.pack(X)), Answer(lambda: X)),
        "pack_filter: float32": (lambda: int8.pack_filter(W.astype("f")), kind("w", "float32")),
        "pack_filter: groups of 3": (lambda: int8.pack_filter(W, groups=3), value("groups", "3")),
        "pack_filter: no taps": (lambda: int8.pack_filter(W[:0]), value("w", "empty")),
        "quantize: int16": (
            lambda: int8.quantize(SCALE, 1.0, dtype=np.int16),
            kind("dtype", "int16"),
        ),
        "quantize: a scale of 0": (lambda: int8.quantize(SCALE, 0.0), value("scale", "positive")),
        "quantize: NaN": (
            lambda: int8.quantize(np.float32(np.nan), 1.0),
            Answer(lambda: np.zeros((), np.int8)),
        ),
        "quantize_weight: a vector": (lambda: int8.quantize_weight(SCALE), value("w", "(32,)")),
        "fold_batch_norm: of another length": (
            lambda: int8.fold_batch_norm(np.ones((3, 3, 4, 8), "f"), SCALE, SCALE, SCALE, SCALE),
            value("gamma", "(8,)", "(32,)"),
        ),
        "fake_quant_conv: int8": (
            lambda: int8.fake_quant_conv(X, W, 1.0),
            kind("x", "int8"),
        ),
        "calibrate: no batches": (lambda: int8.calibrate(lambda x: {"x": x}, []), value("batches")),
        "calibrate: a fraction": (
            lambda: int8.calibrate(lambda x: x, [XF], percentile=0.999),
            value("percentile", "0.999", "percentile=99.9"),
        ),
        "calibrate: 10 per cent": (
            lambda: int8.calibrate(lambda x: x, [XF], percentile=10),
            value("percentile", "50 to 100", "10"),
        ),
        "calibrate: text": (
            lambda: int8.calibrate(lambda x: x, [XF], percentile="99"),
            kind("percentile", "'99'"),
        ),
        "pack_filter: data_format: HWIO": (
            lambda: int8.pack_filter(W, data_format="HWIO"),
            value("data_format", "'HWIO'"),
        ),
        "quantize_conv: data_format: 1-D": (
            lambda: int8.quantize_conv(np.ones((3, 3, 4, 8), "f"), x_scale=1.0, data_format="NWC"),
            value("data_format", "'NWC'"),
        ),
        "fake_quant_conv: padding: CAUSAL": (
            lambda: int8.fake_quant_conv(XF[:, 0], WF[0], 1.0, 1.0, padding="CAUSAL"),
            Answer(
                lambda: int8.fake_quant_conv(XF[:, 0], WF[0], 1.0, 1.0, padding=[(2, 0)]),
            ),
        ),
        "fake_quant_conv: strides": (
            lambda: int8.fake_quant_conv(XF, WF, strides=2),
            kind("strides", "'stride'"),
        ),
    }
    for name, (run, expected) in cases.items():
        yield Case(f"int8/{name}", run, expected)


# --- explain, override, install, export -----------------------------------------------------------


def plain(x: Any, w: Any) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)


def on_kernels(*arguments: Any, **options: Any) -> int:
    return jaxconv.explain(plain, *arguments, **options).on_kernels


def under(*arguments: Any, **options: Any) -> int:
    with jaxconv.override(*arguments, **options):
        return on_kernels(XF, WF)


XF, WF = X4.astype(np.float32), W4.astype(np.float32)


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
    yield from int8_cases()
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (XF, WF)]
    cases: dict[str, tuple[Callable[[], Any], Any]] = {
        "explain/no arguments": (lambda: jaxconv.explain(plain), kind("missing", "'x'")),
        "explain/not a function": (lambda: jaxconv.explain(3), kind("fun", "function", "3")),
        "explain/a result for a function": (
            lambda: jaxconv.explain(plain(XF, WF)),
            kind("fun", "function", "array of shape"),
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
        "install/True": (lambda: installed(True), kind("install")),
        "install/a function": (lambda: installed(plain), kind("override")),
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
    """Runs the bench; raises what it says on stderr where it ends the program."""
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
        "--regret with a peer": ["--regret", "--peer", "im2col"],
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
