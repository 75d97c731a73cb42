"""Compiles the functions of a row: each when it is first needed, or all in advance in threads.

Compiling takes most of the time of a row on a GPU, because XLA tries kernels as it compiles, and
nothing can be timed meanwhile. ``Pipeline`` compiles several rows in threads, and then returns them
one by one, so that nothing else runs on the device during a measurement.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxconv.bench import int8_layers
from jaxconv.bench.problem import Library, Problem
from jaxconv.bench.program import (
    compile_program,
    draw_operands,
    kernel_of,
    libraries,
    operation,
    slices_of,
)

# Rows compiled at a time for each thread: enough that few threads wait for the last row.
_ROWS_PER_JOB = 3


class One(NamedTuple):
    """A compiled program of one convolution.

    Attributes:
        run: the program.
        kernel: the instance that it runs, or "XLA".
        reason: why XLA's convolution runs.
        slices: of the instance's reduction.
        seconds: to trace, lower and compile.
        temporary_bytes: memory in addition to operands and result, if known.
    """

    run: Callable[..., Any]
    kernel: str
    reason: str
    slices: int
    seconds: float
    temporary_bytes: int | None


def compile_one(problem: Problem, library: Library, operands: tuple, platform: str) -> One:
    """Compiles one convolution for operands that ``library.prepare`` returned, or shapes."""
    start = time.perf_counter()
    lowered = jax.jit(library.compute).lower(*operands)
    run = lowered.compile()
    seconds = time.perf_counter() - start
    memory = run.memory_analysis()
    kernel, reason = kernel_of(problem, lowered, run, platform)
    temporary = memory.temp_size_in_bytes if memory else None
    return One(run, kernel, reason, slices_of(lowered), seconds, temporary)


def reference_function(problem: Problem) -> Callable[..., jax.Array]:
    """The sums of the problem by lax, in float32 at HIGHEST or the operands' own wider type."""
    wide = dataclasses.replace(problem, dtype="f32", precision="highest")
    return jax.jit(operation(wide, lax.conv_general_dilated))


def reference_dtype(problem: Problem) -> Any:
    """float32, or for integers float64, which is exact."""
    return jnp.float64 if problem.dtype.startswith("int8") else jnp.float32


@jax.jit
def norms(result: jax.Array, reference: jax.Array) -> tuple[jax.Array, jax.Array]:
    """||result - reference|| and ||reference||, in the dtype of the reference."""
    difference = result.astype(reference.dtype) - reference
    return jnp.linalg.norm(difference.ravel()), jnp.linalg.norm(reference.ravel())


class Ahead:
    """The functions of one row, compiled in threads of a pool.

    Attributes:
        draw: a key -> random operands.
        reference: the operands in the reference's dtype -> the reference's sums.
        norms: the compiled ``norms``.
        libraries: library -> its ``One`` and its program of several convolutions.

    Each is a future, whose result raises the error of compiling. ``others`` are more futures to
    wait for. ``twin``: the same row in int8's other layout, which shares everything except this
    library's functions.
    """

    def __init__(
        self,
        pool: Executor,
        problem: Problem,
        platform: str,
        copies: int,
        im2col: bool = False,
        others: Sequence[Future] = (),
        twin: Ahead | None = None,
    ):
        self.others = others
        shapes = [problem.layer.shape(role) for role in problem.op.roles[:2]]
        result = jax.ShapeDtypeStruct(problem.layer.shape(problem.op.roles[2]), problem.out_dtype)
        draw = draw_operands(problem)
        key = jax.eval_shape(functools.partial(jax.random.key, impl="rbg"), 0)
        pair = jax.eval_shape(draw, key)

        def reference():
            dtype = reference_dtype(problem)
            with jax.enable_x64(dtype == jnp.float64):
                wide = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
                return reference_function(problem).lower(*wide).compile()

        def error():
            dtype = reference_dtype(problem)
            with jax.enable_x64(dtype == jnp.float64):
                wide = jax.ShapeDtypeStruct(result.shape, dtype)
                return norms.lower(result, wide).compile()

        def both(library: Library) -> tuple[One, Callable[..., Any]]:
            prepared = jax.eval_shape(library.prepare, *pair)
            one = compile_one(problem, library, prepared, platform)
            return one, compile_program(library, [prepared] * copies)

        compared = libraries(problem, im2col)
        if twin is not None:
            ours = pool.submit(both, compared["jaxconv"])
            self.libraries: dict[str, Future] = {**twin.libraries, "jaxconv": ours}
            self.reference, self.norms, self.draw = twin.reference, twin.norms, twin.draw
            return
        # The slowest to compile come first.
        self.libraries = {
            name: pool.submit(both, library) for name, library in reversed(compared.items())
        }
        self.reference: Future = pool.submit(reference)
        self.norms: Future = pool.submit(error)
        self.draw: Future = pool.submit(lambda: draw.lower(key).compile())

    def wait(self) -> None:
        """Returns when everything is compiled, or has failed."""
        wait([*self.libraries.values(), self.reference, self.norms, self.draw, *self.others])


class Pipeline:
    """Compiles rows ahead in threads; a context.

    Args:
        jobs: the number of threads; 1 compiles nothing ahead.
        start: compiles one problem's functions in a pool.
    """

    def __init__(self, jobs: int, start: Callable[[Executor, Problem], Ahead]):
        self.jobs, self.start = jobs, start
        self.pool = ThreadPoolExecutor(jobs) if jobs > 1 else None

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:  # after Ctrl-C the remaining rows are not needed
            self.pool.shutdown(wait=True, cancel_futures=True)

    def rows(self, problems: Sequence[Problem]) -> Iterator[tuple[Problem, Ahead | None]]:
        """The problems in order with their functions; nothing compiles between two calls."""
        if self.pool is None:
            yield from ((problem, None) for problem in problems)
            return
        size = self.jobs * _ROWS_PER_JOB
        for at in range(0, len(problems), size):
            batch = problems[at : at + size]
            compiled = [self.start(self.pool, problem) for problem in batch]
            for ahead in compiled:
                ahead.wait()
            compiled.reverse()
            for problem in batch:  # dropped once it is measured: programs hold memory
                yield problem, compiled.pop()


def reference_result(
    problem: Problem, operands: tuple[jax.Array, ...], compiled: Callable[[], Callable] | None
) -> jax.Array:
    """The result by lax: float32 at HIGHEST, or for integers float64, which is exact.

    Args:
        problem: what is computed.
        operands: of one convolution, channels-last.
        compiled: returns the compiled ``reference_function``; None compiles it here.
    """
    lhs, rhs, *epilogue = operands
    dtype = reference_dtype(problem)
    with jax.enable_x64(dtype == jnp.float64):
        compute = reference_function(problem)
        pair = lhs.astype(dtype), rhs.astype(dtype)
        try:
            run = compiled() if compiled is not None else compute
            result = jax.block_until_ready(run(*pair))
        except jax.errors.JaxRuntimeError:  # not every problem runs on every device
            result = compute(*jax.device_put(pair, jax.devices("cpu")[0]))
            result = jax.device_put(result, lhs.device)
        if problem.requantized:
            return jax.jit(int8_layers.requantize_exactly)(result, *epilogue)
        return result
