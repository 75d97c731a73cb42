"""``kernels``: the kernels of this installation, and the problems that each accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxconv._src.library import native
from jaxconv._src.problem import table
from jaxconv._src.problem.spec import ConvSpec, Op, Sizes, key_of

# Each probe is a change to a dense 3x3 convolution, 64 to 64 channels, stride 1, two images of
# 16x16. A kernel accepts or refuses it.
_PROBES: dict[str, dict[str, Any]] = {
    "dense": {},
    "1x1": dict(window=1, pad=0),
    "1-D": dict(rank=1),
    "3-D": dict(rank=3),
    "strides": dict(stride=2),
    "dilation": dict(dilation=2, pad=2),
    "input dilation": dict(lhs_dilation=2),
    "groups": dict(groups=4),
    "depthwise": dict(groups=64),
    "3 input channels": dict(c=3),
    "odd channels": dict(c=63, k=61),
    "batched": dict(batch=3),
    "negative padding": dict(pad=-1),
    "epilogue": dict(epilogue=("scale", "bias", "residual", "relu")),
}
# Precisions for float32 on a GPU: one TF32 product serves DEFAULT only. Three products (instances
# ``_3xtf32``) serve all, but at DEFAULT only if they are requested by name.
_PRECISIONS = ("default", "high", "highest")
# Used without a GPU: the newest architecture with its own kernels.
_TARGET = "sm_90a"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel instance, the unit that ``algorithm`` names and ``explain`` shows.

    Attributes:
        name: the instance, ``<op>_<family>_<dtype>_<tile>_<form>``; CPU kernels have no tile.
        platform: "cpu" or "cuda".
        op: "fprop", "dgrad" or "wgrad"; for kernels of passes, which ``fuse`` calls, "masked_sums",
            "activated_sums", "moments", "normalise", "normalise_add", "elementwise", "max_pool" or
            "max_pool_gradient".
        family: its kernel family, which ``algorithm`` also accepts.
        dtype: the dtype of its operands, as in the name: "f32", "bf16", "f16", "s8", "u8".
        takes: the kinds of problems that it accepts, found by planning them: a dense 3x3
            convolution of 64 channels ("dense"), and that convolution changed in one respect:
            "1x1", "1-D", "3-D", "strides", "dilation", "input dilation" (a transposed convolution),
            "groups" (of 16 channels), "depthwise", "3 input channels", "odd channels", "batched"
            (``vmap`` over both operands), "negative padding", "epilogue" (scale, bias, residual and
            activation in the same call). A kernel with none of them accepts special problems only.
            For a kernel of a pass, its form, as in the name.
        precisions: the precisions that it serves, of "default", "high" and "highest".
    """

    name: str
    platform: str
    op: str
    family: str
    dtype: str
    takes: tuple[str, ...]
    precisions: tuple[str, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Kernels:
    """The kernels of an installation: a sequence of ``Kernel`` that prints as a table.

    Attributes:
        entries: all kernels, by platform; among equally fast kernels, selection prefers the first.
        missing: for each platform without kernels, why.
    """

    entries: tuple[Kernel, ...]
    missing: dict[str, str]

    def __len__(self) -> int:
        """Number of kernels."""
        return len(self.entries)

    def __iter__(self) -> Iterator[Kernel]:
        """The kernels, in order."""
        return iter(self.entries)

    def __getitem__(self, index: int) -> Kernel:
        """One kernel."""
        return self.entries[index]

    def __repr__(self) -> str:
        """The table, so that a prompt shows it."""
        return str(self)

    def __str__(self) -> str:
        """The table, one line for each kernel, and the platforms without kernels."""
        header = ("platform", "kernel", "family", "precision", "takes")
        rows = [
            (k.platform, k.name, k.family, _precisions(k), ", ".join(k.takes) or "special problems")
            for k in self.entries
        ]
        found = table.lines(header, rows) if rows else []
        found += [f"no {platform} kernels: {reason}" for platform, reason in self.missing.items()]
        return "\n".join(found)


def _precisions(kernel: Kernel) -> str:
    return "all" if kernel.precisions == _PRECISIONS else ", ".join(kernel.precisions)


def _key(
    op: Op,
    dtype: str,
    words: Sequence[str],
    precision: str = "default",
    *,
    rank: int = 2,
    batch: int = 1,
    c: int = 64,
    k: int = 64,
    groups: int = 1,
    window: int = 3,
    stride: int = 1,
    dilation: int = 1,
    lhs_dilation: int = 1,
    pad: int = 1,
    epilogue: Sequence[str] = (),
) -> str:
    """The key of a probe."""
    order = tuple(range(rank + 2))
    spec = ConvSpec(
        stride=(stride,) * rank,
        padding=((pad, pad),) * rank,
        lhs_dilation=(lhs_dilation,) * rank,
        dilation=(dilation,) * rank,
        groups=groups,
        in_spatial=(16,) * rank,
        filter_spatial=(window,) * rank,
        x_axes=order,
        w_axes=order,
        y_axes=order,
        precision=precision,
    )
    sizes = Sizes(batch, 2, c, k, spec.in_spatial, spec.filter_spatial, spec.out_spatial)
    dtypes = (dtype, "s8", "s32") if dtype in ("s8", "u8") else (dtype,) * 3
    return key_of(op, dtypes, spec, sizes, [*words, *epilogue])


def _keys(op: Op, dtype: str, precision: str, probe: Mapping[str, Any]) -> Iterator[str]:
    """The keys of a probe, in every layout that exists for it."""
    yield _key(op, dtype, [], precision, **probe)
    if dtype not in ("s8", "u8"):
        return
    for words in (["krsc"], ["packed"]):
        yield _key(op, dtype, words, precision, **probe)
    groups = probe.get("groups", 1)
    channels = [probe.get(name, 64) for name in ("c", "k")]
    if probe.get("rank", 2) == 2 and all(n % (32 * groups) == 0 for n in channels):
        yield _key(op, dtype, ["packed", "nchw32"], precision, **probe)


def _kernel(platform: native.Platform, name: str, families: Sequence[str], target: str) -> Kernel:
    op = Op(name.partition("_")[0])
    inner = name.removeprefix(f"{op.value}_")
    family = max((f for f in families if inner.startswith(f"{f}_")), key=len)
    dtype = inner.removeprefix(f"{family}_").partition("_")[0]

    def accepted(precision: str = "default", **probe: Any) -> bool:
        if op is not Op.FPROP and "epilogue" in probe:
            return False
        keys = _keys(op, dtype, precision, probe)
        return any(platform.select(key, name, target).instance for key in keys)

    takes = {label: probe for label, probe in _PROBES.items() if accepted(**probe)}
    special: list[dict[str, Any]] = list(takes.values()) or [{}]
    precisions = [p for p in _PRECISIONS if any(accepted(p, **probe) for probe in special)]
    return Kernel(
        name, platform.name, op.value, family, dtype, tuple(takes), tuple(precisions or _PRECISIONS)
    )


def _pass(platform: native.Platform, name: str, family: str, op: str) -> Kernel:
    dtype, _, form = name.removeprefix(f"{op}_").partition("_")
    return Kernel(name, platform.name, op, family, dtype, (form,), _PRECISIONS)


def kernels(platform: str | None = None, *, target: str | None = None) -> Kernels:
    """Lists the kernels of this installation, with the problems that each accepts.

        print(jaxconv.kernels("cpu"))
        [k.name for k in jaxconv.kernels() if k.op == "wgrad" and "depthwise" in k.takes]

    Each kernel is tested on about a dozen small problems. ``jaxconv.explain`` shows the kernel of a
    particular problem.

    Args:
        platform: "cpu" or "cuda"; both by default.
        target: for CUDA kernels, the architecture or product, such as "sm_90a" or "l40s"; by
            default ``$JAXCONV_TARGET``, or the GPU of this process, or "sm_90a" without a GPU.

    Returns:
        A ``Kernels``; printing it shows a table.

    Raises:
        ValueError: the ``platform`` or ``target`` does not exist.
    """
    if platform not in (None, *native.PLATFORMS):
        raise ValueError(f"platform: expected 'cpu' or 'cuda', got {platform!r}")
    found: list[Kernel] = []
    missing: dict[str, str] = {}
    for name in native.PLATFORMS if platform is None else (platform,):
        loaded = native.load(name)
        if isinstance(loaded, native.Refusal):
            missing[name] = loaded.reason
            continue
        families = loaded.module.families()
        asked = target or native.target()
        if name == "cpu":
            asked = ""
        elif not asked and all(device.platform != "gpu" for device in jax.devices()):
            asked = _TARGET
        found += [_kernel(loaded, instance, families, asked) for instance in loaded.kernels()]
        found += [_pass(loaded, *named) for named in loaded.pass_kernels()]
    return Kernels(tuple(found), missing)
