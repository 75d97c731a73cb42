"""By which algorithms the convolutions of ``jax.lax`` are to be computed where they are lowered."""

from __future__ import annotations

import contextlib

import jax

from jaxconv._src import compat

# The algorithms of lax's convolutions for fprop, dgrad and wgrad, None where they stay lax's: a
# global value, and one of each thread. JAX has both in the keys of its caches: nothing compiled
# under one value is reused under another.
override_in_force = jax.make_user_context(None)

# The same for what is traced within an override: JAX keeps XLA metadata of an operation with it,
# from its tracing to its lowering, and gives it to its derivatives. "off" leaves them to lax.
_MARK, _OFF = "jaxconv_override", "off"


def marked(algorithms: tuple[str, str, str] | None):
    """A context in which traced convolutions of lax are to be computed by these algorithms."""
    return compat.set_xla_metadata(**{_MARK: ",".join(algorithms) if algorithms else _OFF})


def algorithms_of_lax() -> tuple[str, str, str] | None:
    """By what the convolution of lax that is being lowered is computed, or None: by lax."""
    mark = compat.xla_metadata_in_force().get(_MARK)
    if mark is None:
        return override_in_force.value
    if mark == _OFF:
        return None
    fprop, dgrad, wgrad = mark.split(",")
    return fprop, dgrad, wgrad


@contextlib.contextmanager
def left_to_lax():
    """A context in which convolutions of lax that are traced and lowered stay lax's."""
    mark = marked(None) if _MARK in compat.xla_metadata_in_force() else contextlib.nullcontext()
    with override_in_force(None), mark:
        yield
