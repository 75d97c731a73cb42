"""Spellings of networks: how programs write convolution, norm, shortcut and activation.

A ``Spelling`` is a training network of two such layers and a head, in one of these ways. Its
``Meaning`` says what it computes: ``jaxconv.fuse`` must make the same calls for all spellings of
one meaning. ``canonical`` gives one spelling of every meaning.

    python tests/fuse/spellings.py --table                      the calls that fuse makes of each
    python tests/fuse/spellings.py --table --only einsum --target sm_90a
    python tests/fuse/spellings.py --table --random 20 --seed 3
    python tests/fuse/spellings.py --bytes --jobs 16            the bytes that this GPU moves
    python tests/fuse/spellings.py --bytes --gpu h200           those of an H200, without a GPU

``SPELLINGS`` has every value of every part of a batch norm (``spelling_norms``), the norms of
libraries, every activation and every shortcut (``spelling_layers``); ``GROUPED`` has group norm,
instance norm, and squeeze and excitation (``spelling_groups``); ``drawn`` combines them at random.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import itertools
import multiprocessing
import pathlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import jax
import jax.numpy as jnp
import numpy as np
import spelling_norms
from fuzz_problems import Draw
from jax import lax
from spelling_calls import ORDERS, Calls, Found, complaint, found, moved_bytes, names
from spelling_groups import GROUP_NORMS, SQUEEZES
from spelling_layers import ACTIVATIONS, KEPT, KERNELS, SHORTCUTS, Layer
from spelling_norms import (
    AFFINES,
    CONVERTS,
    MEANS,
    NORMS,
    SPREADS,
    VARIANCES,
    Array,
    Named,
    Norm,
    Parts,
    batch_norm,
    reshape,
    wide,
)

DTYPES = ("bfloat16", "float32", "float16")

# The input's n, spatial extent and channels; the channels of both layers, those between the dense
# layers of squeeze and excitation; the classes. Filters have 1,000 elements or more.
N, EXTENT, INPUT, CHANNELS, SQUEEZED, CLASSES = 4, 8, 64, 16, 8, 10

USUAL = Parts()

TOLERANCE = 0.03  # by which the bytes of two spellings may differ


class Meaning(NamedTuple):
    """What a spelling computes, as far as ``fuse`` distinguishes programs."""

    norm: str
    shortcut: str
    activation: str  # an ``Activation.function``
    layout: str
    dtype: str
    squeeze: str = ""
    biased: bool = False
    remat: bool = False

    @property
    def kind(self) -> Meaning:
        """The same meaning for all activations that a kernel computes alike up to derivatives."""
        return self._replace(activation=KERNELS[self.activation])

    def __str__(self) -> str:
        words = [self.norm, self.shortcut, self.activation, self.squeeze]
        words += ["bias"] * self.biased + ["remat"] * self.remat
        words = [word for word in words if word not in ("", "none")]
        return ", ".join([*words, f"{self.dtype} {self.layout}"])


@dataclasses.dataclass(frozen=True)
class Spelling:
    """A network of two layers, each a convolution, a norm and an activation, and a head.

    The first convolution is pointwise, the second 3x3 with the shortcut around it.

    Attributes:
        parts: the parts of a batch norm, or the name of another norm (``NORMS``, ``GROUP_NORMS``).
        shortcut, activation, squeeze: names.
        biased: whether the convolutions have a bias.
        remat: whether each layer is under ``jax.checkpoint``.
    """

    parts: Parts | str = USUAL
    shortcut: str = "none"
    activation: str = "jax.nn.relu"
    squeeze: str = ""
    biased: bool = False
    remat: bool = False
    layout: str = "NHWC"
    dtype: str = "bfloat16"

    @property
    def meaning(self) -> Meaning:
        norm = "batch" if isinstance(self.parts, Parts) else _norm(self.parts).meaning
        return Meaning(
            norm,
            SHORTCUTS[self.shortcut][0],
            ACTIVATIONS[self.activation].function,
            self.layout,
            self.dtype,
            SQUEEZES[self.squeeze][0] if self.squeeze else "",
            self.biased,
            self.remat,
        )

    @property
    def name(self) -> str:
        """The choices in which it differs from the default."""
        parts = self.parts
        if isinstance(parts, Parts):
            words = [
                f"{f.name} {getattr(parts, f.name)}" if f.name != "early" else "early"
                for f in dataclasses.fields(Parts)
                if getattr(parts, f.name) != getattr(USUAL, f.name)
            ]
        else:
            words = [parts]
        words += [self.shortcut] * (self.shortcut != "none")
        words += [self.activation] * (self.activation != "jax.nn.relu")
        words += [self.squeeze] * bool(self.squeeze)
        words += ["bias"] * self.biased + ["remat"] * self.remat
        return "; ".join([*(words or ["usual"]), f"{self.dtype} {self.layout}"])

    @property
    def missing(self) -> str:
        """The name of a library that it needs and that is not installed, or ""."""
        library = "" if isinstance(self.parts, Parts) else _norm(self.parts).library
        found = not library or importlib.util.find_spec(library.partition(".")[0])
        return "" if found else library

    @property
    def exact(self) -> bool:
        """Whether its source, run in float64, computes its meaning in float64."""
        return not isinstance(self.parts, str) or not _norm(self.parts).library

    @property
    def size(self) -> int:
        """The number of elements of its smaller activations."""
        return N * EXTENT * EXTENT * CHANNELS

    @property
    def channel_axis(self) -> int:
        return self.layout.index("C")

    def norm(self) -> Norm:
        if isinstance(self.parts, Parts):
            return batch_norm(self.parts, self.channel_axis)
        return _norm(self.parts).of_axis(self.channel_axis)

    def convolve(self, x: Array, w: Array) -> Array:
        filters = "HWIO" if self.layout == "NHWC" else "OIHW"
        numbers = (self.layout, filters, self.layout)
        w = w.astype(x.dtype)
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=numbers, precision="highest"
        )

    def features(self, p: dict[str, Array], x: Array) -> Array:
        """The result of the second layer."""
        c, norm, activate = self.channel_axis, self.norm(), ACTIVATIONS[self.activation].apply

        def layer(x: Array, p: dict[str, Array], number: int) -> Array:
            y = self.convolve(x, p[f"w{number}"])
            if self.biased:
                y = y + reshape(p[f"bias{number}"], y, c).astype(y.dtype)
            z = norm(y, p[f"gain{number}"], p[f"offset{number}"])
            if number == 2:
                context = Layer(x, p, self.convolve, norm, c)
                z = SHORTCUTS[self.shortcut][1](z, context)
            return activate(z).astype(x.dtype)

        if self.remat:
            layer = jax.checkpoint(layer, static_argnums=2)
        a = layer(x, p, 1)
        if self.squeeze:
            a = SQUEEZES[self.squeeze][1](a, p, c).astype(x.dtype)
        return layer(a, p, 2)

    def loss(self, p: dict[str, Array], x: Array) -> Array:
        """The cross-entropy of the mean over positions; example n has label n."""
        return self.loss_and_features(p, x)[0]

    def loss_and_features(self, p: dict[str, Array], x: Array) -> tuple[Array, Array]:
        features = self.features(p, x)
        positions = tuple(a for a in range(1, 4) if a != self.channel_axis)
        pooled = features.astype(wide(x.dtype)).mean(positions)
        chances = jax.nn.log_softmax(pooled @ p["head"])
        return -(chances * jnp.eye(*chances.shape, dtype=chances.dtype)).sum(-1).mean(), features

    def values(
        self, ratio: float = 1.0, seed: int = 0, dtype: str = "", apart: bool | None = None
    ) -> tuple[dict[str, Array], Array]:
        """Random parameters in float32, and the input in the layers' type.

        Args:
            ratio: mean over standard deviation of the first convolution's results.
            seed: the seed of all numbers.
            dtype: "float64" for the same numbers in float64.
            apart: whether operands of activations keep a distance from kinks, so that rounding
                moves none across. The default is True for float32 at large ratios, where rounding
                would move a few. In 16 bits it moves many, but equally in all programs.
        """
        rng = np.random.default_rng(seed)
        shape = (N, EXTENT, EXTENT, INPUT)
        x = rng.standard_normal(shape) + ratio
        p: dict[str, np.ndarray] = {}
        w = rng.standard_normal((1, 1, INPUT, CHANNELS)) / np.sqrt(INPUT)
        p["w1"] = w - w.mean(2, keepdims=True) + 1 / INPUT
        p["w2"] = rng.standard_normal((3, 3, CHANNELS, CHANNELS)) / np.sqrt(9 * CHANNELS)
        p["w3"] = rng.standard_normal((1, 1, CHANNELS, CHANNELS)) / np.sqrt(CHANNELS)
        for number in (1, 2, 3):
            p[f"gain{number}"] = 1 + 0.2 * rng.standard_normal(CHANNELS)
            p[f"offset{number}"] = 0.5 * rng.standard_normal(CHANNELS)
            p[f"bias{number}"] = rng.standard_normal(CHANNELS)
        p["scale"] = 0.5 + 0.1 * rng.standard_normal(CHANNELS)
        p["shift"] = 0.5 * rng.standard_normal(CHANNELS)
        p["squeeze"] = rng.standard_normal((CHANNELS, SQUEEZED)) / np.sqrt(CHANNELS)
        p["squeeze_bias"] = 0.1 * rng.standard_normal(SQUEEZED)
        p["excite"] = rng.standard_normal((SQUEEZED, CHANNELS)) / np.sqrt(SQUEEZED)
        p["excite_bias"] = 0.1 * rng.standard_normal(CHANNELS)
        p["head"] = rng.standard_normal((CHANNELS, CLASSES))
        kinks = ACTIVATIONS[self.activation].kinks
        if apart is None:
            apart = self.dtype == "float32" and ratio > 1
        if kinks and apart:
            self._keep_apart(p, [a - 3 for a in kinks] + [kinks[-1] + 3], rng)
        if self.layout == "NCHW":
            x = x.transpose(0, 3, 1, 2)
            p |= {name: p[name].transpose(3, 2, 0, 1) for name in ("w1", "w2", "w3")}
        x = np.asarray(jnp.asarray(x, self.dtype).astype(np.float32))
        p = {name: value.astype(np.float32) for name, value in p.items() if name in self._used()}
        of_x, of_p = (dtype, dtype) if dtype else (self.dtype, "float32")
        return {n: jnp.asarray(v, of_p) for n, v in p.items()}, jnp.asarray(x, of_x)

    def _keep_apart(self, p: dict[str, np.ndarray], centres: list[float], rng) -> None:
        """Places the activation's operands of each channel around one of the centres."""
        places = np.asarray(centres)[np.arange(CHANNELS) % len(centres)]
        for number in (1, 2, 3):
            p[f"gain{number}"] = 0.35 * p[f"gain{number}"]
        p["offset1"] = places + 0.1 * p["offset1"]
        first = np.asarray(ACTIVATIONS[self.activation].apply(jnp.asarray(places, np.float32)))
        shortcut = SHORTCUTS[self.shortcut][0]
        if shortcut == "layer scale":
            p["scale"] = 1 + 0.2 * p["scale"]
        beside = {"none": 0 * first, "projection": 0 * first}.get(shortcut, first)
        if shortcut == "affine":
            beside = first * p["scale"] + p["shift"]
        towards = np.asarray(centres)[rng.integers(0, len(centres), CHANNELS)]
        if shortcut.startswith("stochastic depth"):
            # A dropped example has only the shortcut, which already lies at a centre.
            above = [[c for c in centres if c > f] or [f + 3] for f in first]
            p["offset2"] = KEPT * (np.asarray([each[0] for each in above]) - first)
        else:
            p["offset2"] = towards - beside
        if shortcut == "projection":
            p["offset3"] = 0.1 * p["offset3"]

    def _used(self) -> set[str]:
        numbers = ("1", "2", "3") if "projection" in self.shortcut else ("1", "2")
        names = {f"{kind}{n}" for kind in ("w", "gain", "offset") for n in numbers}
        names |= {f"bias{n}" for n in ("1", "2")} if self.biased else set()
        shortcut = SHORTCUTS[self.shortcut][0]
        names |= {"scale"} if shortcut in ("layer scale", "affine") else set()
        names |= {"shift"} if shortcut == "affine" else set()
        if self.squeeze:
            names |= {"squeeze", "squeeze_bias", "excite", "excite_bias"}
        return names | {"head"}


def _norm(name: str) -> Named:
    return NORMS[name] if name in NORMS else GROUP_NORMS[name]


@functools.cache
def canonical(meaning: Meaning) -> Spelling:
    """The spelling that others of this meaning are compared with."""

    def first(table: dict, wanted: str) -> str:
        return next(name for name, value in table.items() if value[0] == wanted)

    norm = meaning.norm
    parts: Parts | str = USUAL if norm == "batch" else first({**NORMS, **GROUP_NORMS}, norm)
    return Spelling(
        parts,
        first(SHORTCUTS, meaning.shortcut),
        first(ACTIVATIONS, meaning.activation),
        first(SQUEEZES, meaning.squeeze) if meaning.squeeze else "",
        meaning.biased,
        meaning.remat,
        meaning.layout,
        meaning.dtype,
    )


def _batch_norms() -> Iterator[Spelling]:
    """Every value of every part; types alternate, some spellings are in NCHW."""
    yield Spelling()
    values = {
        "mean": MEANS,
        "variance": VARIANCES,
        "affine": AFFINES,
        "spread": SPREADS,
        "converts": CONVERTS,
    }
    at = 0
    for field, allowed in values.items():
        for name in allowed:
            parts = dataclasses.replace(USUAL, **{field: name})
            if parts == USUAL:
                continue
            # Every second spelling broadcasts vectors before the arithmetic.
            parts = dataclasses.replace(parts, early=at % 2 == 1)
            dtype = DTYPES[at % 3] if field != "converts" else DTYPES[at % 2 * 2]
            yield Spelling(parts, dtype=dtype, layout="NCHW" if at % 5 == 4 else "NHWC")
            at += 1
    frames = {
        "jit": [Parts(frame="jit", affine="y * scale + (b - m * scale)")],
        "rows": [Parts(frame="rows"), Parts(frame="rows", mean="ones @ rows")],
        "pixels": [Parts(frame="pixels", variance="jnp.var")],
        "examples": [
            Parts(frame="examples"),
            Parts(frame="examples", variance="two passes", affine="y * a - m * a + b"),
        ],
        "examples and channels": [
            Parts(
                frame="examples and channels",
                variance="two passes, product",
                affine="(y - m) / sqrt * g + b",
            )
        ],
        "channels": [Parts(frame="channels", variance="jnp.var")],
    }
    for index, parts in enumerate(p for each in frames.values() for p in each):
        yield Spelling(parts, dtype=DTYPES[index % 3])
    yield Spelling(Parts(frame="examples"), layout="NCHW", dtype="float32")


def _others_of_batch() -> Iterator[Spelling]:
    """The norms of libraries, and layers with other activations and shortcuts."""
    for index, name in enumerate(NORMS):
        yield Spelling(name, dtype=DTYPES[index % 3])
        if name in ("equinox", "keras.ops", "flax.linen"):
            yield Spelling(name, "z + a", dtype=DTYPES[(index + 1) % 3], layout="NCHW")
    affines = list(AFFINES)
    for index, name in enumerate(ACTIVATIONS):
        if name != "jax.nn.relu":
            parts = Parts(affine=affines[index % len(affines)] if index % 2 else USUAL.affine)
            shortcut = ("none", "z + a")[index % 4 // 3]
            yield Spelling(parts, shortcut, name, dtype=DTYPES[index % 3])
    for index, name in enumerate(SHORTCUTS):
        if name == "none":
            continue
        for activation in ("jax.nn.relu", "jax.nn.silu"):
            parts = Parts(variance=("squares, clipped", "jnp.var")[index % 2])
            yield Spelling(parts, name, activation, dtype=DTYPES[index % 3])
    product = Parts(affine="y * scale + (b - m * scale)", mean="mean, keepdims")
    yield Spelling(product, "z + a", "clip(y, 0, 6)")
    yield Spelling(product, "z + projection", "maximum(y, 0)")
    yield Spelling(product, "z + a", "none")
    yield Spelling(product, "z + projection", layout="NCHW", dtype="float32")
    yield Spelling(product, biased=True)
    yield Spelling("keras.ops", "z + a", biased=True)
    yield Spelling(product, remat=True)
    yield Spelling("centred once", remat=True)


def _grouped() -> Iterator[Spelling]:
    for index, name in enumerate(GROUP_NORMS):
        activation = ("jax.nn.silu", "jax.nn.relu")[index % 4 // 3]
        yield Spelling(name, activation=activation, dtype=DTYPES[index % 3])
    for name, layout in (
        ("group norm, squares", "NCHW"),
        ("group norm, (N, G, -1)", "NCHW"),
        ("group norm of equinox", "NCHW"),
        ("instance norm, jnp.var", "NCHW"),
    ):
        yield Spelling(name, activation="jax.nn.silu", layout=layout)
    yield Spelling("group norm, squares", "z + a", "y * sigmoid(y)")
    yield Spelling("group norm, jnp.var", "a + z", "jax.nn.silu")
    product = Parts(affine="y * scale + (b - m * scale)")
    for index, name in enumerate(SQUEEZES):
        activation = ("jax.nn.silu", "y * sigmoid(y)")[index % 2]
        yield Spelling(USUAL, "z + a", activation, name, dtype=DTYPES[index % 3])
    yield Spelling(product, "none", "jax.nn.hard_swish", "squeeze, hard_sigmoid")
    yield Spelling(product, "none", "y * relu6(y + 3) / 6", "squeeze, clip", layout="NCHW")


def _named(spellings: Iterator[Spelling]) -> dict[str, Spelling]:
    return {spelling.name: spelling for spelling in spellings}


# Batch norms for ``fuse``, although their coefficients differ from the usual ones.
OTHER_VALUES = ("epsilon outside", "mixed statistics")

SPELLINGS = _named(_batch_norms()) | _named(_others_of_batch())
GROUPED = _named(_grouped())


def drawn(seed: int, index: int) -> Spelling:
    """The random spelling of (seed, index), with any parts that can be combined."""
    d = Draw(seed, index, 5)
    layout = d.one_of("NHWC", "NHWC", "NHWC", "NCHW")
    parts = spelling_norms.drawn(d, layout)
    installed = [name for name in NORMS if not Spelling(name).missing]
    return Spelling(
        d.one_of(parts, parts, parts, parts, *installed),
        d.one_of("none", "none", *SHORTCUTS),
        d.one_of("jax.nn.relu", "jax.nn.silu", *ACTIVATIONS),
        d.one_of("", "", "", "", *SQUEEZES),
        d.chance(0.1),
        d.chance(0.1),
        layout,
        d.one_of("bfloat16", *DTYPES),
    )


# --- the table ---


def _brief(counted: Calls[str]) -> str:
    return " ".join(
        f"{name.removeprefix('jaxconv_')}:{count}" for name, count in sorted(counted.items())
    )


def table(chosen: list[Spelling], of_target: str, forms: bool) -> int:
    """Prints the calls of each spelling and of its canonical one; returns how many differ."""
    import jaxconv

    @functools.cache
    def of(spelling: Spelling, order: str) -> Found:
        return found(spelling, order, jaxconv.fuse, of_target)

    groups: dict[Meaning, list[Spelling]] = {}
    for spelling in chosen:
        groups.setdefault(spelling.meaning, []).append(spelling)
    differ = 0
    for meaning, members in groups.items():
        model_of: dict[str, Found] = {}
        print(f"\n{meaning}")
        for order in ORDERS:
            model_of[order] = of(canonical(meaning), order)
            print(f"    {order:8} {_brief(names(model_of[order].calls))} | {model_of[order].left}")
        for spelling in members:
            if spelling.missing:
                print(f"  -  {spelling.name}: {spelling.missing} is not installed")
                continue
            said = []
            for order in ORDERS:
                # A spelling that fails is a row of the table, whatever it raises.
                try:
                    each = of(spelling, order)
                except Exception as error:
                    said.append(f"{order}: {type(error).__name__}: {str(error).splitlines()[0]}")
                    continue
                if changed := complaint(each, model_of[order], forms):
                    said.append(f"{order}: {changed} | {each.left}")
            differ += bool(said)
            print(f"  {'!' if said else '='}  {spelling.name}")
            for line in said:
                print(f"       {line}")
    print(f"\n{len(chosen)} spellings of {len(groups)} meanings, {differ} differ in their calls")
    return differ


def _moved(program: tuple[Spelling, str], gpu: str) -> int | str:
    """The bytes that a program moves, or why it fails, whatever it raises."""
    import jaxconv

    try:
        return moved_bytes(*program, jaxconv.fuse, gpu)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def bytes_table(chosen: list[Spelling], jobs: int, gpu: str) -> int:
    """Prints the bytes that each spelling's gradient moves on a GPU over its canonical one's.

    Args:
        chosen: the spellings.
        jobs: the number of programs that are compiled at a time.
        gpu: the name of a described GPU, or "" for this machine's.

    Returns:
        The number of spellings whose program moves more than TOLERANCE too much or fails.
    """
    chosen = [spelling for spelling in chosen if not spelling.missing]
    models = {canonical(spelling.meaning) for spelling in chosen}
    programs = [(s, order) for s in dict.fromkeys([*chosen, *models]) for order in ORDERS]

    # Tracing holds Python's lock, so each job is a process; a CUDA context survives no fork.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        moved = pool.map(functools.partial(_moved, gpu=gpu), programs, chunksize=4)
        of = dict(zip(programs, moved, strict=True))
    above, ratios = 0, []
    for spelling, order in itertools.product(chosen, ORDERS):
        here, model = of[spelling, order], of[canonical(spelling.meaning), order]
        if isinstance(here, str) or isinstance(model, str):
            said, bad = here if isinstance(here, str) else f"canonical: {model}", True
        else:
            ratios.append(here / model)
            said, bad = f"{here / 1e6:.1f} MB, {here / model:.3f}", here > (1 + TOLERANCE) * model
        above += bad
        print(f"  {'!' if bad else '='}  {spelling.name}, {order}: {said}")
    print(f"\n{len(chosen)} spellings, {above} programs of {len(programs)} move more bytes", end="")
    print(f"; ratios from {min(ratios):.3f} to {max(ratios):.3f}" if ratios else "")
    return above


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--table", action="store_true", help="print what fuse makes of every spelling")
    add("--bytes", action="store_true", help="print the bytes that their programs move on a GPU")
    add("--jobs", type=int, default=4, help="programs of --bytes that are compiled at a time")
    add("--gpu", default="", help="of --bytes: the name of a GPU that need not be here, as h200")
    add("--only", default="", help="of spellings whose name has this in it")
    add("--dtype", choices=DTYPES, help="all of them in one type")
    add("--forms", action="store_true", help="compare static halves too, not names alone")
    add("--target", default="", help="JAXCONV_TARGET while programs are traced, such as sm_90a")
    add("--random", type=int, default=0, help="so many random spellings in place of the list")
    add("--seed", type=int, default=0, help="of random spellings")
    options = parser.parse_args()
    import jax_settings  # noqa: F401

    if options.random:
        chosen = [drawn(options.seed, index) for index in range(options.random)]
    else:
        chosen = [*SPELLINGS.values(), *GROUPED.values()]
    if options.dtype:
        chosen = [dataclasses.replace(spelling, dtype=options.dtype) for spelling in chosen]
    chosen = [s for s in dict.fromkeys(chosen) if options.only in s.name]
    if options.bytes:
        return int(bool(bytes_table(chosen, options.jobs, options.gpu)))
    if not options.table:
        for spelling in chosen:
            print(spelling.name, "=", spelling.meaning)
        return 0
    return int(bool(table(chosen, options.target, options.forms)))


if __name__ == "__main__":
    sys.exit(main())
