"""What the bench measures, and what it finds: a problem, its two sides, a row of the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxconv._src.problem.spec import Op
from jaxconv._src.ways import winograd_jax
from jaxconv.bench.layers import Layer

# Operands by name. All of int8: "int8" has the sums as its result, int32, as lax; the others are
# requantised to int8, with scale, bias and ReLU in the convolution, in one layout or the other.
DTYPES = {
    "f32": jnp.float32,
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "int8": jnp.int8,
    "int8_nhwc": jnp.int8,
    "int8_nchw32": jnp.int8,
}

# Largest accepted ||a - b|| / ||b|| against a float32 HIGHEST reference, by (dtype, precision).
# 16-bit results are rounded once, to 2^-9 or 2^-12 relative at worst (and 1 / sqrt(3) of that on
# average), TF32 products are off by 3e-4. A float32 sum over n random terms is off by about
# 1e-8 sqrt(n): 1e-5 in the longest weight gradients, in the reference as well.
_BOUNDS = {
    ("f32", "default"): 1e-3,
    ("f32", "high"): 1e-4,
    ("f32", "highest"): 5e-5,
    ("bf16", None): 4e-3,
    ("f16", None): 5e-4,
    ("int8", None): 0.0,
    ("int8_nhwc", None): 0.0,
    ("int8_nchw32", None): 0.0,
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One operation of one layer, at one dtype."""

    name: str
    layer: Layer
    op: Op
    dtype: str
    precision: str = "default"
    algorithm: str = "auto"
    variant: bool = False  # measured alone, beside the row of another algorithm
    prepared: bool = False  # the filter is transformed for Winograd before the measurement

    @property
    def operand_dtype(self) -> np.dtype:
        return np.dtype(DTYPES[self.dtype])

    @property
    def requantized(self) -> bool:
        """Whether the result is rounded to int8 in the convolution."""
        return self.dtype in ("int8_nhwc", "int8_nchw32")

    @property
    def out_dtype(self) -> np.dtype:
        return np.dtype(np.int32) if self.dtype == "int8" else self.operand_dtype

    @property
    def nbytes(self) -> int:
        return self.layer.nbytes(self.op, self.operand_dtype, self.out_dtype)

    @property
    def footprint(self) -> int:
        """Bytes of one convolution in a program: two results, as an earlier one may be alive."""
        result = self.layer.size(self.op.roles[2]) * self.out_dtype.itemsize
        return self.nbytes + result

    @property
    def bound(self) -> float:
        """The largest accepted relative error."""
        precision = self.precision if self.dtype == "f32" else None
        bound, tile = _BOUNDS[self.dtype, precision], winograd_jax.tile_named(self.algorithm)
        return max(bound, 2 * winograd_jax.largest_rms_error(self.dtype, tile, self.precision))

    @property
    def dtype_label(self) -> str:
        return self.dtype if self.precision == "default" else f"{self.dtype} {self.precision}"


@dataclasses.dataclass(frozen=True)
class Library:
    """How one library computes a problem.

    Attributes:
        compute: the operation on operands, which a program holds several times.
        prepare: the problem's operands, channels-last -> those of ``compute``. A network does this
            once, so it is not measured.
        finish: the result of ``compute`` -> the result, channels-last.
    """

    compute: Callable[..., Any]
    prepare: Callable[..., tuple] = lambda *operands: operands
    finish: Callable[[Any], Any] = lambda result: result


@dataclasses.dataclass
class Side:
    """One library on one problem. Times are seconds for one convolution."""

    compile_s: float | None = None  # trace, lower and compile a program of one convolution
    temporary_bytes: int | None = None  # memory of that program beside operands and result
    error: float | None = None  # ||a - b|| / ||b|| against the reference
    median_s: float | None = None
    p20_s: float | None = None
    p80_s: float | None = None
    kernels: list[str] = dataclasses.field(default_factory=list)  # in a trace of the program
    failure: str | None = None


@dataclasses.dataclass
class Row:
    """The result for one problem."""

    problem: Problem
    platform: str
    kernel: str = "?"  # the instance that ran, or "XLA"
    reason: str = ""  # why XLA's convolution ran
    refused: bool = False  # the demanded algorithm does not take this problem
    left_to_xla: bool | None = None  # by algorithm auto; known of rows of algorithm native
    copies: int = 0
    repetitions: int = 0
    sides: dict[str, Side] = dataclasses.field(default_factory=dict)
    slices: int = 1  # of the instance's reduction

    @property
    def wrong(self) -> bool:
        """True where this library failed, or its result is not the reference's."""
        ours = self.sides["jaxconv"]
        if ours.error is None:
            return not self.refused
        return self.other_kernel_ran or not ours.error <= self.problem.bound  # also when it is NaN

    @property
    def other_kernel_ran(self) -> bool:
        """True where the program was traced and no kernel of the selected instance is in it."""
        kernels = self.sides["jaxconv"].kernels
        # Algorithms in JAX are XLA's operations, under names of XLA's.
        named = self.kernel not in ("XLA", "?") and not self.kernel.endswith(("_im2col", "_jax"))
        return bool(kernels) and named and not any(self.kernel in kernel for kernel in kernels)

    def ratio(self, peer: str = "lax") -> float | None:
        """How many times longer ``peer`` takes; None where either was not timed."""
        ours, theirs = self.sides["jaxconv"], self.sides.get(peer)
        if self.wrong or not ours.median_s or theirs is None or not theirs.median_s:
            return None
        return theirs.median_s / ours.median_s

    def rate(self, amount: float) -> float | None:
        """``amount`` per second of this library's median time."""
        seconds = self.sides["jaxconv"].median_s
        return amount / seconds if seconds else None

    def as_json(self) -> dict[str, Any]:
        problem, layer = self.problem, self.problem.layer
        return {
            "layer": problem.name,
            "problem": dataclasses.asdict(layer),
            "op": problem.op.value,
            "dtype": problem.dtype,
            "precision": problem.precision,
            "algorithm": problem.algorithm,
            "variant": problem.variant,
            "prepared": problem.prepared,
            "left_to_xla": self.left_to_xla,
            "kernel": self.kernel,
            "slices": self.slices,
            "reason": self.reason,
            "wrong": self.wrong,
            "refused": self.refused,
            "error_bound": problem.bound,
            "flop": layer.flops,
            "bytes": problem.nbytes,
            "flop_per_s": self.rate(layer.flops),
            "bytes_per_s": self.rate(problem.nbytes),
            "copies": self.copies,
            "repetitions": self.repetitions,
            "ratio": {peer: self.ratio(peer) for peer in self.sides if peer != "jaxconv"},
            **{name: dataclasses.asdict(side) for name, side in self.sides.items()},
        }

    @classmethod
    def from_json(cls, found: dict[str, Any], platform: str) -> Row:
        """The row that ``as_json`` has written."""
        sizes = {k: tuple(v) if isinstance(v, list) else v for k, v in found["problem"].items()}
        values = (found[name] for name in ("dtype", "precision", "algorithm", "variant"))
        named = found["layer"], Layer(**sizes), Op(found["op"])
        return cls(
            Problem(*named, *values, found["prepared"]),
            platform,
            found["kernel"],
            found["reason"],
            found["refused"],
            found["left_to_xla"],
            found["copies"],
            found["repetitions"],
            {name: Side(**found[name]) for name in ("jaxconv", *found["ratio"])},
            found.get("slices", 1),
        )
