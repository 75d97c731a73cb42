"""``explain``: the kernel of each convolution of a program, or why XLA computes it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export

from jaxconv._src import compat
from jaxconv._src.call import record, selection
from jaxconv._src.call.record import Convolution as Convolution
from jaxconv._src.lax import lax_lowering
from jaxconv._src.report import staging
from jaxconv._src.report.explanation import Explanation as Explanation


def _occurrences(module) -> collections.Counter[tuple[str, int]]:
    """How often the program runs each operation of a tag and index; loop bodies count once.

    The number of lowerings does not tell: JAX lowers a function once and calls it from many places,
    or copies it into them.
    """
    callees: dict[str, list[str]] = {}
    marked: dict[str, list[tuple[str, int]]] = {}
    for function in module.body.operations:
        name = function.attributes["sym_name"].value
        callees[name], marked[name] = [], []

        def visit(operation, name=name):
            for tag in (record.TAG, record.PASS_TAG):
                if tag in operation.attributes:
                    marked[name].append((tag, operation.attributes[tag].value))
            if operation.name == "func.call":
                callees[name].append(operation.attributes["callee"].value)
            return compat.CONTINUE_WALK

        function.operation.walk(visit)
    counts: collections.Counter[tuple[str, int]] = collections.Counter()

    def enter(name: str, times: int) -> None:
        for operation in marked[name]:
            counts[operation] += times
        for callee, number in collections.Counter(callees[name]).items():
            enter(callee, times * number)

    enter("main", 1)
    return counts


def _check_function(fun: Any) -> None:
    """Refuses objects that are no function, and programs whose kernels are already chosen."""
    stage = isinstance(fun, jax.stages.Compiled | jax.stages.Lowered | jax.stages.Traced)
    if stage or isinstance(fun, jax.export.Exported):
        raise TypeError(
            f"fun: expected a function, got a program that JAX has {type(fun).__name__.lower()} "
            "already. Give the function that it was made of, jitted or not, and the arguments: "
            "explain(f, x), not explain(jax.jit(f).lower(x).compile(), x)"
        )
    if callable(fun):
        return
    if hasattr(fun, "shape") and hasattr(fun, "dtype"):
        raise TypeError(
            f"fun: expected a function and then its arguments, got an array of shape {fun.shape}: "
            "explain(f, x), not explain(f(x))"
        )
    raise TypeError(f"fun: expected a function and then its arguments, got {fun!r:.80}")


def explain(
    fun: Callable, *args: Any, platform: str | None = None, wide: bool = False, **kwargs: Any
) -> Explanation:
    """Lists every convolution of ``fun(*args, **kwargs)``: its kernel, or why XLA computes it.

    The program is traced and lowered as by ``jax.jit``, but not run. Convolutions of ``jax.lax``
    are listed too; they use this library's kernels if ``install`` or ``override`` is in force here.
    As under ``jax.jit``, a convolution whose result is neither returned nor stored in an argument
    that ``fun`` changes is not part of the program.

    Args:
        fun: a function of arrays: a plain one, or one jitted by ``jax.jit``, ``nnx.jit`` or
            ``eqx.filter_jit``, whose static arguments are also static here.
        args, kwargs: its arguments, as for a call. Arrays may be ``jax.ShapeDtypeStruct``; in a
            plain function, arguments that are no arrays are constants.
        platform: "cpu" or "cuda", by default that of the arguments. For a platform without a device
            here, set ``JAXCONV_TARGET`` to name one, such as "sm_90a".
        wide: prints every column, one line for each convolution. By default lines have at most 100
            characters, and convolutions that differ only in their source line are one row.

    Returns:
        An ``Explanation``; printing it shows a summary, a table and reasons (``Explanation.text``).
        With arguments sharded over several devices, shapes are those of the whole arrays, and
        kernels those for the whole arrays.

    Raises:
        TypeError: ``fun`` is no function, or a program that JAX has compiled, lowered or traced.
        ValueError: the ``platform`` does not exist.
    """
    if platform not in (None, *selection.PLATFORMS):
        raise ValueError(f"platform: expected 'cpu' or 'cuda', got {platform!r}")
    _check_function(fun)
    lax_lowering.register()
    traced = staging.trace(fun, args, kwargs)
    options = {} if platform is None else {"lowering_platforms": (platform,)}
    with record.recording(tagged=True) as found:
        lowered = compat.lower_afresh(traced, **options)
    counts = _occurrences(lowered.compiler_ir())

    def counted(rows: Sequence[Any], tag: str) -> tuple[Any, ...]:
        return tuple(
            dataclasses.replace(row, count=counts[tag, index])
            for index, row in enumerate(rows)
            if counts[tag, index]
        )

    found_rows, passes = counted(found, record.TAG), counted(found.passes, record.PASS_TAG)
    return Explanation(found_rows, passes, wide=wide)
