"""What ``override`` says: by which algorithms lax's convolutions are computed; what is fused."""

from __future__ import annotations

import contextlib
from typing import Any

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


# Whether `fuse` may change what this thread traces, None where nothing is said. What is traced
# within an override is marked, as for the algorithms above.
fuse_in_force = jax.make_user_context(None)
_FUSE_MARK, _ON = "jaxconv_fuse", "on"


def marked_for_fuse(enabled: bool):
    """A context in which ``fuse`` takes traced convolutions, or leaves them."""
    return compat.set_xla_metadata(**{_FUSE_MARK: _ON if enabled else _OFF})


def may_fuse(eqn: Any) -> bool:
    """Whether ``override`` lets ``fuse``, which is called here, change an equation."""
    mark = compat.metadata(eqn).get(_FUSE_MARK)
    return mark == _ON if mark is not None else fuse_in_force.value is not False


@contextlib.contextmanager
def left_to_lax():
    """A context in which convolutions of lax that are traced and lowered stay lax's."""
    mark = marked(None) if _MARK in compat.xla_metadata_in_force() else contextlib.nullcontext()
    with override_in_force(None), mark:
        yield
