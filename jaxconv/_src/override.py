"""Our kernels under every convolution of a program: ``install``, ``uninstall``, ``override``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxconv._src import arguments, compat, lax_lowering, lowering
from jaxconv._src.arguments import Algorithm


def install(*, algorithm: Algorithm = "auto") -> None:
    """Computes every ``jax.lax`` convolution of this process with this library's kernels.

    Flax, Equinox, Haiku, Keras and plain JAX all end in ``lax.conv_general_dilated``. Its lowering
    is replaced on CPU and CUDA devices. Gradients and ``vmap`` stay lax's; their convolutions are
    recognized as forward pass, data gradient or weight gradient. What no kernel takes
    stays XLA's (``jaxconv.explain`` says which and why).

    The setting is part of JAX's cache keys: functions compiled before are compiled again when next
    called. May be called any number of times, from any thread; the last call counts.

    Args:
        algorithm: as in ``jaxconv.conv``. "auto" leaves a convolution to XLA also where XLA's own
            is predicted to be faster than every kernel; "native" only where no kernel accepts it
            (the environment variable JAXCONV_ALGORITHM=native makes it the meaning of "auto"). A
            convolution that another algorithm, such as "winograd", does not take is computed as
            with "auto"; ``jaxconv.explain`` shows why.

    Raises:
        TypeError, ValueError: there is no such algorithm.
    """
    algorithms = arguments.algorithms(algorithm)
    lax_lowering.register()
    compat.set_global(lowering.override_in_force, algorithms)


def uninstall() -> None:
    """Undoes ``install``: convolutions compiled from now on are XLA's again."""
    compat.set_global(lowering.override_in_force, None)


@contextlib.contextmanager
def override(enabled: bool = True, *, algorithm: Algorithm = "auto") -> Iterator[None]:
    """Like ``install``, for the calling thread and the body of a ``with`` statement.

        with jaxconv.override():
            y = model(x)

    What counts is where a function is called (or lowered), not where it was defined or wrapped in
    ``jit``. Nests, and the innermost counts: ``override(False)`` leaves convolutions to XLA inside
    an installed program.

    Args:
        enabled: whether lax convolutions go to our kernels meanwhile.
        algorithm: as in ``install``.

    Raises:
        TypeError, ValueError: there is no such algorithm.
    """
    algorithms = arguments.algorithms(algorithm)
    lax_lowering.register()
    with lowering.override_in_force(algorithms if enabled else None):
        yield
