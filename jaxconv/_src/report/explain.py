"""``explain``: which kernel each convolution of a program takes, or why it is left to XLA."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxconv._src import compat
from jaxconv._src.call import record, selection
from jaxconv._src.call.record import Convolution as Convolution
from jaxconv._src.lax import lax_lowering
from jaxconv._src.report import staging
from jaxconv._src.report.explanation import Explanation as Explanation


def _occurrences(module) -> collections.Counter[tuple[str, int]]:
    """How often the program comes by each operation of a tag and index; loop bodies count once.

    A lowering is not the program's order: JAX lowers a function once and calls it from many places,
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


def explain(
    fun: Callable, *args: Any, platform: str | None = None, wide: bool = False, **kwargs: Any
) -> Explanation:
    """Lists every convolution of ``fun(*args, **kwargs)``: its kernel, or why XLA computes it.

    The program is traced and lowered as ``jax.jit`` would, and not run. Convolutions of ``jax.lax``
    appear too; whether our kernels take them depends on ``install`` or ``override`` being in force
    here. A convolution whose result is neither returned nor kept in an argument that ``fun``
    changes is not part of the program, as under ``jax.jit``.

    Args:
        fun: a function of arrays: a plain one, or one jitted by ``jax.jit``, ``nnx.jit`` or
            ``eqx.filter_jit``, whose static arguments are static here too.
        args, kwargs: its arguments, as for a call. Arrays may be ``jax.ShapeDtypeStruct``; of a
            plain function, arguments that are no arrays are constants.
        platform: "cpu" or "cuda", by default where the arguments are. For a platform without a
            device here, set ``JAXCONV_TARGET`` to name one, such as "sm_90a".
        wide: print every column, one line for each convolution. By default the text has 100 columns
            at most, and convolutions that differ in their place in the code alone are one row.

    Returns:
        An ``Explanation``; printing it shows a summary, a table and reasons
        (``Explanation.text``). With arguments that are sharded over several
        devices the shapes are the whole arrays', and the kernels those they would take.

    Raises:
        TypeError: ``fun`` cannot be called.
        ValueError: ``platform`` is another one.
    """
    if platform not in (None, *selection.PLATFORMS):
        raise ValueError(f"platform: expected 'cpu' or 'cuda', got {platform!r}")
    if not callable(fun):
        raise TypeError(f"fun: expected a function and then its arguments, got {fun!r}")
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
