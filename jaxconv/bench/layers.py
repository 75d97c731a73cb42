"""The convolution layers that benchmarks and tests share, and their groups.

``LAYERS`` maps a name to a ``Layer``, ``SETS`` a name to a choice of layers. The first 22 layers
are the set "all": real networks' layers at their usual batch sizes, chosen so that every regime
occurs (memory-bound and compute-bound, strided, dilated, grouped, depthwise, 1-D, 3-D).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxconv._src.problem.spec import ConvSpec, Op, Sizes, flops, output_extent


@dataclasses.dataclass(frozen=True)
class Layer:
    """One convolution, channels-last: x (n, *spatial, c), w (*window, c / groups, k).

    ``spatial``, ``window``, ``stride``, ``padding`` and ``dilation`` have one entry per spatial
    axis; padding counts on both sides. An operation of the layer is an ``Op``.
    """

    n: int
    spatial: tuple[int, ...]
    c: int
    k: int
    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int = 1
    dilation: tuple[int, ...] = ()  # () stands for 1 on every axis

    def __post_init__(self) -> None:
        if not self.dilation:
            object.__setattr__(self, "dilation", (1,) * self.rank)

    @property
    def rank(self) -> int:
        return len(self.spatial)

    @property
    def out_spatial(self) -> tuple[int, ...]:
        return tuple(
            output_extent(i, r, s, 1, d, p, p)
            for i, r, s, d, p in zip(
                self.spatial, self.window, self.stride, self.dilation, self.padding, strict=True
            )
        )

    @property
    def flops(self) -> int:
        """Multiplications and additions of any of the three operations, padding counted."""
        return flops(self.spec(), self.sizes)

    @property
    def sizes(self) -> Sizes:
        return Sizes(1, self.n, self.c, self.k, self.spatial, self.window, self.out_spatial)

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of tensor "x", "w" or "y"."""
        return self.spec().shape(role, self.sizes)

    def size(self, role: str) -> int:
        """Number of elements of tensor "x", "w" or "y"."""
        return int(np.prod(self.shape(role), dtype=np.int64))

    def nbytes(self, op: Op, dtype: np.dtype, out_dtype: np.dtype) -> int:
        """The bytes that ``op`` moves if it accesses every tensor once."""
        lhs, rhs, out = op.roles
        operands = (self.size(lhs) + self.size(rhs)) * np.dtype(dtype).itemsize
        return operands + self.size(out) * np.dtype(out_dtype).itemsize

    def spec(self, precision: str = "default", algorithm: str = "auto") -> ConvSpec:
        """The static half of the problem, as the primitives take it."""
        axes = tuple(range(self.rank + 2))
        return ConvSpec(
            stride=self.stride,
            padding=tuple((p, p) for p in self.padding),
            lhs_dilation=(1,) * self.rank,
            dilation=self.dilation,
            groups=self.groups,
            in_spatial=self.spatial,
            filter_spatial=self.window,
            x_axes=axes,
            w_axes=axes,
            y_axes=axes,
            precision=precision,
            algorithm=(algorithm,) * 3,
        )

    def with_batch_at_most(self, n: int) -> Layer:
        """The same layer on at most ``n`` examples."""
        return dataclasses.replace(self, n=min(self.n, n))

    def __str__(self) -> str:
        """For example "64x56x56 128->128 3x3 /2 g32 d2"."""

        def times(values: tuple[int, ...]) -> str:
            return "x".join(map(str, values))

        def common(values: tuple[int, ...]) -> str:
            return str(values[0]) if len(set(values)) == 1 else times(values)

        text = f"{times((self.n, *self.spatial))} {self.c}->{self.k} {times(self.window)}"
        if set(self.stride) != {1}:
            text += f" /{common(self.stride)}"
        if self.groups > 1:
            text += f" g{self.groups}"
        if set(self.dilation) != {1}:
            text += f" d{common(self.dilation)}"
        return text


def _same(
    n: int,
    spatial: tuple[int, ...],
    c: int,
    k: int,
    r: int,
    *,
    stride: int = 1,
    groups: int = 1,
    dilation: int = 1,
) -> Layer:
    """A layer with a window of odd extent r on every axis, centred on the pixel it writes."""
    rank = len(spatial)
    return Layer(
        n,
        spatial,
        c,
        k,
        (r,) * rank,
        (stride,) * rank,
        (dilation * (r - 1) // 2,) * rank,
        groups,
        (dilation,) * rank,
    )


LAYERS: dict[str, Layer] = {
    # ResNet-50
    "r50_stem": _same(64, (224, 224), 3, 64, 7, stride=2),
    "r50_56_1x1a": _same(64, (56, 56), 64, 64, 1),
    "r50_56_3x3": _same(64, (56, 56), 64, 64, 3),
    "r50_56_1x1b": _same(64, (56, 56), 64, 256, 1),
    "r50_56_s2": _same(64, (56, 56), 128, 128, 3, stride=2),
    "r50_28_3x3": _same(64, (28, 28), 128, 128, 3),
    "r50_14_3x3": _same(64, (14, 14), 256, 256, 3),
    "r50_7_3x3": _same(64, (7, 7), 512, 512, 3),
    "r50_ds_1x1s2": _same(64, (56, 56), 256, 512, 1, stride=2),
    # VGG
    "vgg_112": _same(32, (112, 112), 128, 128, 3),
    "vgg_28": _same(32, (28, 28), 512, 512, 3),
    # one large image, 64 channels: the classic workload of Winograd convolution
    "seed_224": _same(1, (224, 224), 64, 64, 3),
    "seed_480": _same(1, (480, 480), 64, 64, 3),
    "seed_960": _same(1, (960, 960), 64, 64, 3),
    # latent diffusion
    "unet_64": _same(4, (64, 64), 320, 320, 3),
    "vae_512": _same(1, (512, 512), 128, 128, 3),
    # depthwise and grouped
    "convnext_dw": _same(64, (56, 56), 96, 96, 7, groups=96),
    "mobile_dw": _same(64, (14, 14), 512, 512, 3, groups=512),
    "resnext_g32": _same(64, (56, 56), 128, 128, 3, groups=32),
    # dilated, 1-D, 3-D
    "deeplab_d2": _same(16, (64, 64), 256, 256, 3, dilation=2),
    "audio_1d": _same(16, (3000,), 512, 512, 3),
    "video_3d": _same(2, (16, 56, 56), 128, 128, 3),
    # beyond "all": wide 3x3 layers, depthwise and grouped layers, an 11x11 stem, a patch embedding
    "sdxl_128": _same(2, (128, 128), 320, 320, 3),
    "sdxl_64": _same(2, (64, 64), 640, 640, 3),
    "sdxl_32": _same(2, (32, 32), 1280, 1280, 3),
    "mobile_dw_s2": _same(64, (56, 56), 192, 192, 3, stride=2, groups=192),
    "efficientnet_dw5": _same(32, (28, 28), 240, 240, 5, groups=240),
    "replknet_dw31": _same(16, (56, 56), 128, 128, 31, groups=128),
    "causal_dw4": Layer(8, (8195,), 2048, 2048, (4,), (1,), (0,), 2048),  # padded before
    "regnet_g8": _same(64, (28, 28), 256, 256, 3, groups=8),
    "alexnet_stem": Layer(64, (224, 224), 3, 64, (11, 11), (4, 4), (2, 2)),
    "vit_patchify": Layer(64, (224, 224), 3, 768, (16, 16), (16, 16), (0, 0)),
}


class LayerSet(NamedTuple):
    """Names of layers, and how they are meant to be measured.

    Attributes:
        about: a short description.
        names: keys of ``LAYERS``.
        dtypes, precision: the defaults depend on the platform.
        ops: operations; () stands for all.
        batches: numbers of images for layers with several; () stands for the layer's own.
        variants: its problems have variants, which ``tools/bench`` measures.
    """

    about: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    precision: str | None = None
    ops: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    variants: bool = False

    def layers(self) -> Iterator[tuple[str, Layer]]:
        """Every layer with its name, in all batches."""
        for name in self.names:
            layer = LAYERS[name]
            for n in self.batches if layer.n > 1 and self.batches else (layer.n,):
                yield name, dataclasses.replace(layer, n=n)


def _starting(*prefixes: str) -> tuple[str, ...]:
    return tuple(name for name in LAYERS if name.startswith(prefixes))


SETS: dict[str, LayerSet] = {
    "all": LayerSet("the 22 reference layers", tuple(LAYERS)[:22]),
    "quick": LayerSet(
        "one layer of each common kind, for a first look",
        ("r50_56_1x1a", "r50_56_3x3", "r50_7_3x3", "mobile_dw"),
    ),
    "resnet50": LayerSet("the distinct shapes of ResNet-50", _starting("r50_")),
    "vgg": LayerSet("large dense 3x3 layers", _starting("vgg_")),
    "diffusion": LayerSet("U-Net and autoencoder layers", _starting("unet", "vae", "sdxl")),
    "grouped": LayerSet(
        "depthwise and grouped layers", ("convnext_dw", "mobile_dw", "resnext_g32", "replknet_dw31")
    ),
    "memory": LayerSet(
        "depthwise, grouped, few-channel and patch layers, near the time of their bytes",
        (
            *("mobile_dw", "mobile_dw_s2", "convnext_dw", "efficientnet_dw5", "replknet_dw31"),
            *("causal_dw4", "resnext_g32", "regnet_g8", "r50_stem", "alexnet_stem", "vit_patchify"),
        ),
    ),
    "winograd": LayerSet(
        "dense 3x3 layers, by every variant of Winograd beside the direct kernel",
        (
            *("vgg_112", "unet_64", "sdxl_64", "vgg_28", "sdxl_32"),
            *("seed_224", "seed_480", "seed_960"),
        ),
        dtypes=("f16", "bf16"),
        ops=("fprop",),
        batches=(4, 8, 32),
        variants=True,
    ),
    "highest": LayerSet(
        "float32 at Precision.HIGHEST",
        ("r50_56_3x3", "r50_28_3x3", "r50_14_3x3", "vgg_112", "unet_64", "r50_56_1x1b"),
        dtypes=("f32",),
        precision="highest",
    ),
    "int8": LayerSet(
        "int8 operands, int8 results in both layouts, int32 results",
        (
            *("r50_56_3x3", "r50_56_1x1b", "r50_28_3x3", "r50_14_3x3", "r50_7_3x3", "vgg_112"),
            *("vgg_28", "seed_224", "seed_960", "unet_64"),
        ),
        dtypes=("int8_nhwc", "int8_nchw32", "int8"),
    ),
    "special": LayerSet(
        "few channels, dilated, 1-D, 3-D, patches",
        ("r50_stem", "vit_patchify", "deeplab_d2", "audio_1d", "video_3d"),
    ),
}

FORM = (
    "N,H,W,C,K,R,S,stride,pad[,groups[,dilation]] in 2-D, "
    "1d:N,W,C,K,S,stride,pad[,...] or 3d:N,D,H,W,C,K,T,R,S,stride,pad[,...]"
)


def parse(text: str) -> Layer:
    """Reads a layer from ``FORM``; stride, pad and dilation hold for every spatial axis.

    Raises:
        ValueError: the text does not have this form, or describes no convolution.
    """
    match = re.fullmatch(r"(?:([123])d:)?(-?\d+(?:,-?\d+)*)", text.replace(" ", ""))
    if not match:
        raise ValueError(f"{text!r}: expected {FORM}")
    rank = int(match[1] or 2)
    numbers = [int(field) for field in match[2].split(",")]
    needed = 2 * rank + 5
    if not needed <= len(numbers) <= needed + 2:
        raise ValueError(
            f"{text!r}: a {rank}-D layer has {needed} to {needed + 2} numbers, got {len(numbers)}; "
            f"the form is {FORM}"
        )
    n, spatial, (c, k) = numbers[0], numbers[1 : rank + 1], numbers[rank + 1 : rank + 3]
    window, (stride, pad, *rest) = numbers[rank + 3 : 2 * rank + 3], numbers[2 * rank + 3 :]
    groups, dilation = (*rest, *(1, 1)[len(rest) :])
    if min(n, *spatial, c, k, *window, stride, groups, dilation) < 1:
        raise ValueError(f"{text!r}: every number but pad is at least 1")
    if c % groups or k % groups:
        raise ValueError(f"{text!r}: {groups} groups do not divide C = {c} and K = {k}")
    layer = Layer(
        n,
        tuple(spatial),
        c,
        k,
        tuple(window),
        (stride,) * rank,
        (pad,) * rank,
        groups,
        (dilation,) * rank,
    )
    if 0 in layer.out_spatial:
        raise ValueError(f"{text!r}: the window does not fit the padded input; no outputs")
    return layer


def random_layers(count: int, seed: int = 0) -> dict[str, Layer]:
    """Dense layers with channels in multiples of 8, of 1 to 100 GFLOP: name -> layer."""
    rng = np.random.default_rng(seed)
    found: dict[str, Layer] = {}
    while len(found) < count:
        rank = int(rng.choice([1, 2, 2, 2, 2, 3]))
        extent = int(np.exp(rng.uniform(np.log(7), np.log((0, 4096, 256, 48)[rank]))))
        window = int(rng.choice([1, 1, 3, 3, 3, 5]))
        stride, dilation = ((1, 1), (1, 1), (2, 1), (1, 2))[rng.integers(4)]
        dilation = dilation if window > 1 else 1
        n = int(2 ** rng.integers(0, 8))
        c, k = (8 * int(np.exp(rng.uniform(np.log(2), np.log(128)))) for _ in range(2))
        pad = dilation * (window - 1) // 2
        prefix = "" if rank == 2 else f"{rank}d:"
        numbers = [n, *[extent] * rank, c, k, *[window] * rank, stride, pad, 1, dilation]
        text = prefix + ",".join(map(str, numbers))
        layer = parse(text)
        operands = 2 * (layer.size("x") + layer.size("w") + layer.size("y"))
        if 1e9 <= layer.flops <= 1e11 and operands <= 5e8:
            found[text] = layer
    return found
