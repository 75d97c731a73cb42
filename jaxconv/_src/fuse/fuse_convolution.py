"""Finds convolutions that may get an epilogue, and predicts whether the epilogue saves time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jaxconv._src import compat
from jaxconv._src.call import override_state, record, selection
from jaxconv._src.conv import bilinear, canonical
from jaxconv._src.conv.bilinear import Bilinear
from jaxconv._src.conv.fused import Fused
from jaxconv._src.fuse.fuse_graph import Graph, is_float, type_of
from jaxconv._src.lax import lax_lowering
from jaxconv._src.library import native
from jaxconv._src.problem.epilogue import Epilogue
from jaxconv._src.problem.spec import ConvSpec, Op, Sizes
from jaxconv._src.ways import winograd_jax

# Primitives that are, or may be, forward convolutions.
NAMES = ("conv_general_dilated", "jaxconv_fprop")

# The reason of a chain that ends because the function returns its result.
RETURNED = "its result is returned"


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A forward convolution in a program: its equation, operands and static parameters."""

    position: int
    x: Any
    w: Any
    spec: ConvSpec

    @property
    def channel_axis(self) -> int:
        return self.spec.axis("y", "k")


def channel_axis(eqn: JaxprEqn) -> int:
    """The axis of channels of a convolution's result."""
    if eqn.primitive.name == "conv_general_dilated":
        return eqn.params["dimension_numbers"].out_spec[1]
    return eqn.params["spec"].axis("y", "k")


def find(graph: Graph, position: int) -> Convolution | str:
    """The convolution at a position if a call can compute an epilogue, else why it cannot."""
    eqn = graph.eqns[position]
    if reason := _left(eqn):
        return reason
    x, w = eqn.invars
    shapes = [type_of(a).shape for a in (x, w, *eqn.outvars)]
    if reason := lax_lowering.outside(shapes, eqn.params.get("window_strides", ())):
        return reason
    dtypes = [type_of(a).dtype for a in (x, w, *eqn.outvars)]
    if not all(is_float(d) for d in dtypes) or dtypes[0] != dtypes[1]:
        return f"no fused kernel for {', '.join(np.dtype(d).name for d in dtypes)}"
    if eqn.primitive.name == "conv_general_dilated":
        spec = _forward(graph, eqn, shapes)
    else:
        spec = eqn.params["spec"]
    if isinstance(spec, str):
        return spec
    if spec.batched:
        return "each example has a filter of its own"
    algorithm = spec.algorithm_of(Op.FPROP)
    if algorithm in selection.WITH_WINOGRAD:
        if name := _by_winograd(spec, spec.sizes(Op.FPROP, *shapes[:2]), dtypes[1:]):
            return f"{name} is predicted faster, and has no epilogue"
    elif algorithm not in (selection.AUTO, selection.NATIVE):
        return f"algorithm={algorithm!r} was asked for"
    return Convolution(position, x, w, spec)


def _left(eqn: JaxprEqn) -> str:
    """Why ``fuse`` must leave a convolution alone, or "".

    ``override(fuse=False)`` excludes it; or ``fuse`` has already seen it in a function that was
    then differentiated, and recorded why its chain ends. If that function returned the result, the
    derivative's program may continue the chain.
    """
    if not override_state.may_fuse(eqn):
        return "override(fuse=False)"
    seen = compat.metadata(eqn).get(record.CHAIN_END, "")
    return "" if seen == RETURNED else seen


def _by_winograd(spec: ConvSpec, sizes: Sizes, dtypes: Sequence[np.dtype]) -> str:
    """The Winograd kernel that is selected on one of the platforms, or ""."""
    for platform in platforms():
        if platform in native.PLATFORMS:
            chosen, _ = bilinear.select(platform, Op.FPROP, spec, sizes, *dtypes)
            if winograd_jax.tile_named(chosen.instance or ""):
                return str(chosen.instance)
    return ""


def _forward(graph: Graph, eqn: JaxprEqn, shapes: list[tuple[int, ...]]) -> ConvSpec | str:
    """The parameters of a lax convolution as fprop, or why it has no epilogue."""
    with compat.located_at(eqn):
        algorithm = override_state.algorithms_of_lax()
    convolution = lax_lowering.conv_parameters(*([algorithm] if algorithm else []), **eqn.params)
    made = graph.producer(eqn.invars[1])
    turned = made.params["dimensions"] if made and made.primitive.name == "rev" else ()
    form = canonical.forms(
        convolution,
        *shapes,
        filter_reversed=bool(turned) and sorted(turned) == sorted(convolution.rhs_spec[2:]),
    )[0]
    if form.op is not Op.FPROP or form.batch > 1 or form.pointwise:
        return f"it is computed as {form.op.value}, which has no epilogue"
    if eqn.params.get("out_sharding") is not None:
        return "it has an out_sharding"
    return form.spec


def platforms() -> tuple[str, ...]:
    """The platforms for which a program traced here is lowered; at least one.

    "cuda" first if ``JAXCONV_TARGET`` names a GPU, then the platform of the default device.
    """
    config: Any = jax.config  # some versions of JAX do not declare its options
    device = config.jax_default_device or jax.default_backend()
    here = device if isinstance(device, str) else device.platform
    named = ["cuda"] if native.target() else []
    return tuple(dict.fromkeys([*named, "cuda" if here == "gpu" else here]))


def for_cuda() -> bool:
    """Whether a program traced here is lowered for CUDA, where passes over arrays have kernels."""
    return platforms()[0] == "cuda"


def by_kernel(spec: ConvSpec, operands: Sequence[Any]) -> bool:
    """Whether a kernel is predicted faster than XLA's convolution plus a pass over its result.

    Args:
        spec: a convolution without an epilogue, with the algorithm "native".
        operands: the types of x and w.
    """
    platform = platforms()[0]
    if platform not in native.PLATFORMS:
        return False
    dtype = np.dtype(operands[0].dtype)
    problem = (platform, spec.sizes(Op.FPROP, *(aval.shape for aval in operands)), dtype)
    chosen, _ = Bilinear(Op.FPROP, spec, dtype).select(*problem)
    if chosen.instance is None:
        return False
    xla = chosen.xla_microseconds
    one_pass, _ = _passes(spec, Epilogue(bias=True), dtype, problem, xla)
    known = 0 not in (chosen.microseconds, xla) and one_pass >= 0
    return not known or chosen.microseconds < xla + one_pass


def _passes(
    spec: ConvSpec,
    form: Epilogue,
    out_dtype: np.dtype,
    problem: tuple[str, Sizes, np.dtype],
    plain: float,
) -> tuple[float, float]:
    """The predicted microseconds of XLA's pass over a convolution's result with an epilogue.

    Both numbers are differences of predictions of XLA's convolution. Its prediction with an
    epilogue includes a pass over float32 sums, which have twice the bytes of a 16-bit result; hence
    the division by 2.

    Args:
        spec, out_dtype: the convolution, and the dtype of its result.
        form: the epilogue.
        problem: platform, extents and operand dtype.
        plain: the prediction of XLA's convolution without an epilogue.

    Returns:
        The time of the memory traffic, and the time that the activation's instructions add.
    """

    def xla_time(form: Epilogue) -> float:
        return Fused(spec, form, out_dtype).select(*problem)[0].xla_microseconds

    linear = Epilogue(form.scale, form.bias, form.residual)
    if linear.plain:
        linear = Epilogue(bias=True)
    of_linear, activation = xla_time(linear), 0.0
    if form.activation is not None:
        activation = xla_time(dataclasses.replace(form, pre=False, statistics=False)) - of_linear
    return (of_linear - plain) / 2, max(0.0, activation)


def slower(
    spec: ConvSpec,
    operands: Sequence[Any],
    form: Epilogue,
    out_dtype: np.dtype,
    readers: int,
    by_kernel: bool = False,
) -> str:
    """Why a call would be slower than the program, or "".

    Args:
        spec: the convolution.
        operands: the types of x and w.
        form: the epilogue of its call.
        out_dtype: the dtype of the result.
        readers: the number of uses of the result inside which XLA would compute the epilogue
            (``Graph.absorbed``), so that it saves the activation's instructions there but no pass;
            0 if it saves a pass.
        by_kernel: True for the call of a product, which is slower in any case without a kernel.

    If no kernel computes the epilogue, the call is a plain convolution with float32 sums, to which
    XLA applies the epilogue. In 16 bits, writing and reading these sums costs more than the
    program's operations; statistics that no kernel computes are better left to the program in any
    case. A kernel with an epilogue may also be predicted slower than the plain kernel plus XLA's
    pass over its result; for statistics this pass only reads the result.
    """
    if operands[0].dtype == np.float32 and not form.statistics and not by_kernel:
        return ""
    platform, dtype = platforms()[0], np.dtype(out_dtype)
    refusals: Sequence[native.Refusal] = [native.Refusal(platform, "no kernels for it")]
    if platform in native.PLATFORMS:
        sizes = spec.sizes(Op.FPROP, *(aval.shape for aval in operands))
        problem = (platform, sizes, operands[0].dtype)
        chosen, _ = Fused(spec, form, dtype).select(*problem)
        if chosen.instance is not None:
            plain, _ = Bilinear(Op.FPROP, spec, dtype).select(*problem)
            xla = plain.xla_microseconds
            if form.statistics:
                one_pass = chosen.xla_microseconds - xla
            else:
                of_bytes, of_activation = _passes(spec, form, dtype, problem, xla)
                one_pass = readers * of_activation if readers else of_bytes + of_activation
            apart = min(plain.microseconds, xla) + one_pass
            known = plain.microseconds > 0 and xla > 0
            if known and apart < chosen.microseconds:
                rest = "" if one_pass == 0 else " and XLA's pass over its result"
                return (
                    f"{chosen.instance} is predicted to take {chosen.microseconds:.1f} us, the "
                    f"convolution{rest} {apart:.1f} us"
                )
            return ""
        refusals = chosen.refusals
    return f"no kernel computes {' '.join(form.words)} here: {selection.reasons(refusals)}"
