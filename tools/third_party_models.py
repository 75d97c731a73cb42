"""Runs models of other libraries on lax, on jaxconv and under jaxconv.fuse, and compares results.

    pip install dm-haiku equimo 'flax>=0.12' jax-resnet keras kimm namex optree
    pip install 'diffusers<0.36' 'transformers<5'  # the last with models in Flax
    pip install --no-deps flaxmodels flaxdiff eqxvision  # the models need none of the rest
    python tools/third_party_models.py --list       # the models, and what is installed
    python tools/third_party_models.py --model haiku/ResNet18 --json models.json

None of these models was written for this library, and none is changed. Weights are random; nothing
is downloaded. Each model computes its outputs and the gradient of a loss with respect to its
parameters, in float32 on small images: as lax does, under ``override`` (what ``install`` does for a
process), and under ``override`` and ``fuse``.

"difference" is that of a side's results from lax's, the largest of ||a - b|| / ||b|| over all
arrays; an array whose norm is below 1e-3 of the largest is divided by that. The bound is ``FACTOR``
times "rounding", the largest difference of lax from itself in ``MOVES`` runs that move each
parameter and input by one unit in the last place. Every layer rounds its results, and sums in
another order, so results move by a few times that. Where the argument of a ReLU changes its sign,
or another element of a window is the largest, gradients jump: of ReLUs by the square root of the
share of such units, 1e-2 in deep networks. Therefore several runs are made, and the bound is at
most ``LARGEST_BOUND``; an array with a wrong or a missing term differs by about 1. The bound is
that of float32: on a GPU, where lax takes TF32, set JAX_DEFAULT_MATMUL_PRECISION=highest.

"compile s" is the processor's time, of all threads, to trace, lower and compile, which other
programs on the machine change less than the clock's.

A model that its library cannot build or that lax cannot run is skipped, with the reason in its row.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras_networks
import numpy as np
from keras_networks import SIDES, compiled, explained, failure, report

from jaxconv.bench import environment, measure_network

FACTOR = 32
LARGEST_BOUND = 0.1
MOVES = 16
MODES = ("infer", "gradient")
BATCH = 16  # of 2 examples, batch norm behind global pooling leaves a sign


class Network(NamedTuple):
    """A model as functions of (parameters, state, *inputs).

    Attributes:
        parameters: what the gradient is taken of.
        state: other arrays, such as running means; may be empty.
        inputs: images and what else the model takes.
        infer: returns the outputs.
        train: returns the outputs in training, where that differs.
    """

    parameters: Any
    state: Any
    inputs: tuple
    infer: Callable
    train: Callable | None = None


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    """Normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def images(size: int, channels: int = 3, *, first: bool = False, scale: float = 1) -> np.ndarray:
    """Random images, channels first or last."""
    x = np.float32(scale) * normal(BATCH, size, size, channels)
    return x.transpose(0, 3, 1, 2) if first else x


# --- libraries ------------------------------------------------------------------------------------


def linen(module: Any, *inputs: Any, training: dict | None = None, **infer: Any) -> Network:
    """A module of flax.linen; ``infer`` and ``training`` are arguments of its call."""
    variables = jax.jit(functools.partial(module.init, **infer))(jax.random.key(0), *inputs)
    state = {name: value for name, value in variables.items() if name != "params"}

    def apply(parameters, state, *inputs):
        return module.apply({"params": parameters, **state}, *inputs, **infer)

    def train(parameters, state, *inputs):
        variables = {"params": parameters, **state}
        return module.apply(variables, *inputs, **training, mutable=list(state))[0]

    return Network(variables["params"], state, inputs, apply, None if training is None else train)


def haiku(name: str, size: int, **arguments: Any) -> Network:
    """A network of haiku.nets."""
    import haiku as hk

    def call(x, is_training):
        return getattr(hk.nets, name)(num_classes=10, **arguments)(x, is_training=is_training)

    model, x = hk.transform_with_state(call), images(size)
    init = jax.jit(functools.partial(model.init, is_training=True))
    parameters, state = init(jax.random.key(0), x)

    def apply(parameters, state, x, is_training=False):
        return model.apply(parameters, state, None, x, is_training)[0]

    return Network(parameters, state, (x,), apply, functools.partial(apply, is_training=True))


def keras_model(model: Any, state: keras_networks.State, x: jax.Array) -> Network:
    """A model of Keras."""

    def apply(parameters, state, x, training=False):
        return model.stateless_call(parameters, state, x, training=training)[0]

    train = functools.partial(apply, training=True)
    return Network(state.trainable, state.others, (x,), apply, train)


def application(name: str, size: int, scale: float = 1) -> Network:
    """A network of keras.applications."""
    return keras_model(*keras_networks.network(name, size, classes=10), images(size, scale=scale))


def kimm(name: str, size: int) -> Network:
    """A network of kimm, which is made of Keras's layers."""
    shape, module = (size, size, 3), importlib.import_module("kimm.models")
    model = getattr(module, name)(input_shape=shape, weights=None, classes=10)
    return keras_model(model, keras_networks.state_of(model), images(size, scale=255))


def transformers(name: str, size: int, **config: Any) -> Network:
    """A model of transformers: Flax's form of it, or of its part for images."""
    library = importlib.import_module("transformers")
    settings = getattr(library, f"{name}Config")(image_size=size, **config)
    model = getattr(library, f"Flax{name}Model")(settings, input_shape=(1, size, size, 3))

    def apply(parameters, state, x):
        return model(x, params={"params": parameters, **state} if state else parameters)

    def train(parameters, state, x):
        return model(x, params={"params": parameters, **state}, train=True)[0]

    state = {k: v for k, v in model.params.items() if k == "batch_stats"}
    parameters = model.params["params"] if state else model.params
    x = images(size, first=True)
    return Network(parameters, state, (x,), apply, train if state else None)


def equinox(model: Any, size: int) -> Network:
    """A model of Equinox for one image with its channels first."""
    import equinox as eqx

    parameters, static = eqx.partition(model, eqx.is_inexact_array)

    def apply(parameters, state, x):
        call = functools.partial(eqx.combine(parameters, static), key=jax.random.key(0))
        return jax.vmap(call)(x)

    return Network(parameters, (), (images(size, first=True),), apply)


def equimo(name: str, size: int, **arguments: Any) -> Network:
    """A model of equimo."""
    make = getattr(importlib.import_module("equimo.models"), name)
    return equinox(make(num_classes=10, key=jax.random.key(0), **arguments), size)


def eqxvision(name: str, size: int) -> Network:
    """A model of eqxvision."""
    return equinox(getattr(importlib.import_module("eqxvision.models"), name)(num_classes=10), size)


def jax_resnet(name: str, size: int) -> Network:
    """A model of jax_resnet, whose batch norm trains as its module says."""
    library = importlib.import_module("jax_resnet")
    return linen(getattr(library, name)(n_classes=10), images(size), training={})


def flaxmodels(name: str, x: np.ndarray, **arguments: Any) -> Network:
    """A model of flaxmodels, whose call has an argument ``train``."""
    library: Any = importlib.import_module("flaxmodels")
    for part in name.split("."):
        library = getattr(library, part)
    module = library(pretrained=None, **arguments)
    return linen(module, x, training={"train": True}, train=False)


def diffusers(name: str, *inputs: Any, **arguments: Any) -> Network:
    """A model of diffusers in Flax."""
    return linen(getattr(importlib.import_module("diffusers"), name)(**arguments), *inputs)


def flaxdiff(*inputs: Any, **arguments: Any) -> Network:
    """The U-Net of flaxdiff."""
    library = importlib.import_module("flaxdiff.models.simple_unet")
    return linen(library.Unet(**arguments), *inputs)


# --- models ---------------------------------------------------------------------------------------

UNET = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
}
DOWN, UP = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
VAE = {"DownEncoderBlock2D": "down_block_types", "UpDecoderBlock2D": "up_block_types"}
VIT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8}


STEPS = np.arange(1, BATCH + 1)  # of a diffusion, one for each example
TOKENS = normal(BATCH, 7, 32)  # an encoded text for each example
VECTORS = normal(BATCH, 64)  # what a generator of images takes

# "library/model": a function that makes it.
MODELS: dict[str, Callable[[], Network]] = {
    "keras/MobileNetV3Small": lambda: application("MobileNetV3Small", 64, scale=255),
    "keras/EfficientNetV2B0": lambda: application("EfficientNetV2B0", 64, scale=255),
    "keras/ConvNeXtTiny": lambda: application("ConvNeXtTiny", 32, scale=255),
    "keras/DenseNet121": lambda: application("DenseNet121", 64),
    "keras/ResNet50V2": lambda: application("ResNet50V2", 64),
    "keras/VGG16": lambda: application("VGG16", 32),
    "keras/Xception": lambda: application("Xception", 71),
    "kimm/GhostNetW050": lambda: kimm("GhostNetW050", 64),
    "kimm/RegNetY002": lambda: kimm("RegNetY002", 64),
    "haiku/MobileNetV1": lambda: haiku("MobileNetV1", 64),
    "haiku/ResNet18": lambda: haiku("ResNet18", 64, resnet_v2=True),
    "jax_resnet/ResNet18": lambda: jax_resnet("ResNet18", 64),
    "jax_resnet/ResNeXt50": lambda: jax_resnet("ResNeXt50", 64),
    "jax_resnet/ResNeSt50Fast": lambda: jax_resnet("ResNeSt50Fast", 64),
    "flaxmodels/ResNet18": lambda: flaxmodels("ResNet18", images(64)),
    "flaxmodels/VGG16": lambda: flaxmodels("VGG16", images(32), include_head=False),
    "flaxmodels/StyleGAN2 generator": lambda: flaxmodels(
        "stylegan2.Generator",
        VECTORS,
        resolution=32,
        fmap_max=32,
        num_ws=8,
        **dict.fromkeys(("z_dim", "w_dim", "mapping_layer_features"), VECTORS.shape[1]),
    ),
    "diffusers/FlaxUNet2DConditionModel": lambda: diffusers(
        "FlaxUNet2DConditionModel",
        images(32, 4, first=True),
        STEPS,
        TOKENS,
        down_block_types=DOWN,
        up_block_types=UP,
        **UNET,
    ),
    "diffusers/FlaxControlNetModel": lambda: diffusers(
        "FlaxControlNetModel",
        images(16, 4, first=True),
        STEPS,
        TOKENS,
        images(128, first=True),
        down_block_types=DOWN,
        **UNET,
    ),
    "diffusers/FlaxAutoencoderKL": lambda: diffusers(
        "FlaxAutoencoderKL",
        images(32, first=True),
        block_out_channels=(32, 64),
        **{argument: (block, block) for block, argument in VAE.items()},
    ),
    "transformers/ResNet": lambda: transformers("ResNet", 64, depths=[2, 2, 2, 2]),
    "transformers/RegNet": lambda: transformers(
        "RegNet", 64, depths=[1, 2, 2, 1], hidden_sizes=[32, 64, 96, 128], groups_width=16
    ),
    "transformers/ViT": lambda: transformers("ViT", 32, intermediate_size=128, **VIT),
    "transformers/Dinov2": lambda: transformers("Dinov2", 32, **VIT),
    "transformers/Beit": lambda: transformers("Beit", 32, intermediate_size=128, **VIT),
    "transformers/CLIPVision": lambda: transformers("CLIPVision", 32, **VIT),
    "equimo/convnext_t": lambda: equimo("convnext_t", 32),
    "equimo/mobilenetv3_small": lambda: equimo("mobilenetv3_small", 64),
    "equimo/iformer_t": lambda: equimo("iformer_t", 64, depths=[1, 1, 1, 1, 1, 1]),
    "equimo/lowformer_backbone_b0": lambda: equimo(
        "lowformer_backbone_b0", 64, depths=[0, 1, 1, 1, 1], attention_type="softmax"
    ),
    "flaxdiff/Unet": lambda: flaxdiff(
        images(32), STEPS / 10, TOKENS, feature_depths=[32, 64], attention_configs=[None, None]
    ),
    "eqxvision/resnet18": lambda: eqxvision("resnet18", 64),
}
DISTRIBUTIONS = {"haiku": "dm-haiku", "jax_resnet": "jax-resnet"}


# --- judgement ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """One side of one model and mode, or a model that was skipped."""

    model: str
    mode: str = ""
    side: str = ""
    library: str = ""  # and its version
    convolutions: int | None = None
    on_kernels: int | None = None
    fused: int | None = None  # convolutions whose call computes more
    compile_s: float | None = None
    difference: float | None = None
    rounding: float | None = None
    outcome: str = "right"  # or what is wrong

    @property
    def failed(self) -> bool:
        """Whether something is wrong with the model on this side."""
        return self.outcome != "right" and not self.outcome.startswith("skipped")


def is_real(leaf: Any) -> bool:
    """Whether something is an array of floating-point numbers."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def changed(tree: Any, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    """A tree with change(array) for its arrays of real numbers."""
    return jax.tree.map(lambda a: change(np.asarray(a)) if is_real(a) else a, tree)


def varied(a: np.ndarray) -> np.ndarray:
    """An array of one repeated number with noise, so that no branch is multiplied by zeros."""
    return a + 0.1 * normal(*a.shape, seed=3) if a.size and np.ptp(a) == 0 else a


def moved(a: np.ndarray, seed: int) -> np.ndarray:
    """An array whose numbers are moved by about one unit in the last place, some up, some down."""
    return a * (1 + np.finfo(a.dtype).eps * np.sign(normal(*a.shape, seed=seed)))


def difference(ours: Any, theirs: Any) -> float:
    """The largest of ||a - b|| / ||b|| over all arrays (see the head); nan if one is not finite."""
    ours, theirs = (
        [np.ravel(np.asarray(a, np.float64)) for a in jax.tree.leaves(tree) if is_real(a)]
        for tree in (ours, theirs)
    )
    norms = np.array([np.linalg.norm(b) for b in theirs])
    errors = np.array([np.linalg.norm(a - b) for a, b in zip(ours, theirs, strict=True)])
    return float(np.max(errors / np.maximum(norms, 1e-3 * np.max(norms))))


def functions(network: Network) -> dict[str, tuple[Callable, tuple]]:
    """A model's functions, each with its arguments."""
    parameters, state = changed((network.parameters, network.state), varied)
    train = network.train or network.infer
    results = jax.eval_shape(train, parameters, state, *network.inputs)
    targets = jax.tree.map(lambda y: normal(*y.shape, seed=2), results)

    def loss(parameters, state, targets, *inputs):
        pairs = zip(
            jax.tree.leaves(train(parameters, state, *inputs)),
            jax.tree.leaves(targets),
            strict=True,
        )
        return sum(jnp.mean((y - t) ** 2) for y, t in pairs if is_real(y))

    return {
        "infer": (network.infer, (parameters, state, *network.inputs)),
        "gradient": (jax.grad(loss), (parameters, state, targets, *network.inputs)),
    }


def judged(name: str, mode: str, function: Callable, arguments: tuple) -> list[Row]:
    """What each side makes of a function.

    Raises:
        Exception: whatever lax's side raises.
    """
    jax.eval_shape(function, *arguments)  # what a library does once, it does for no side
    rows, results, rounding = [], {}, 0.0
    for side in SIDES:
        row = Row(name, mode, side)
        try:
            program, row.compile_s = compiled(side, function, arguments, time.process_time)
            results[side] = jax.block_until_ready(program(*arguments))
            if side == "lax":
                for seed in range(MOVES):
                    others = changed(arguments, functools.partial(moved, seed=seed))
                    rounding = max(rounding, difference(program(*others), results["lax"]))
            explanation = explained(side, function, arguments)
            row.convolutions = len(explanation)
            row.on_kernels = explanation.on_kernels
            row.fused = sum(c.count for c in explanation if c.epilogue)
            row.difference = difference(results[side], results["lax"])
            row.rounding = rounding
            bound = min(FACTOR * max(rounding, np.finfo(np.float32).eps), LARGEST_BOUND)
            if not row.difference <= bound:
                row.outcome = f"differs by {row.difference:.0e}, bound {bound:.0e}"
        except Exception as error:  # shown in the row, whatever a library raises
            if side == "lax":
                raise
            row.outcome = failure(error)
        rows.append(row)
    return rows


def distribution_of(name: str) -> str:
    """The PyPI name of a model's library."""
    library = name.partition("/")[0]
    return DISTRIBUTIONS.get(library, library)


def measured(name: str, modes: Sequence[str] = MODES) -> list[Row]:
    """A model's rows."""
    distribution = distribution_of(name)
    version = environment.version(distribution)
    known = f"{distribution} {version or ''}".strip()
    try:
        if version is None:
            raise ImportError(f"{distribution} is not installed")
        rows = []
        for mode, (function, arguments) in functions(MODELS[name]()).items():
            if mode in modes:
                rows += judged(name, mode, function, arguments)
    except Exception as error:  # of the library itself
        rows = [Row(name, outcome=f"skipped: {failure(error)}")]
    return [dataclasses.replace(row, library=known) for row in rows]


def line(row: Row) -> str:
    """A row of the table."""

    def cell(value: Any, width: int, form: str = "") -> str:
        return format("-" if value is None else format(value, form), f">{width}")

    cells = [
        f"{row.model:34s} {row.mode:8s} {row.side:7s}",
        cell(row.convolutions, 12) + cell(row.on_kernels, 8) + cell(row.fused, 6),
        cell(row.compile_s, 9, ".1f"),
        cell(row.difference, 10, ".1e") + cell(row.rounding, 9, ".1e"),
        f" {row.outcome}",
    ]
    return " ".join(cells)


HEADER = (
    f"{'model':34s} {'mode':8s} {'side':7s} {'convolutions':>12s} {'kernels':>7s} {'fused':>5s} "
    f"{'compile s':>9s} {'difference':>10s} {'rounding':>8s}  outcome"
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", nargs="+", choices=MODELS, metavar="NAME", help="of --list (default: all)")
    add("--mode", nargs="+", choices=MODES, default=MODES)
    add("--json", metavar="FILE", help="write all results")
    add("--list", action="store_true", help="print the models and the libraries' versions")
    return parser


def main(argv: Sequence[str]) -> int:
    """Prints a table, a row for each model, mode and side; 1 where one fails or differs."""
    chosen = _parser().parse_args(argv)
    if chosen.list:
        for name in MODELS:
            version = environment.version(distribution_of(name))
            print(f"{name:34s} {version or 'not installed'}")
        return 0
    measure_network.warm_up()
    groups = (measured(name, chosen.mode) for name in chosen.model or MODELS)
    rows = report(environment.describe(), HEADER, line, groups, chosen.json, argv)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
