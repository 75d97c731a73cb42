"""The state of ``override``: the algorithms of lax's convolutions, and what is fused."""

from __future__ import annotations

import contextlib
from typing import Any

import jax

from jaxconv._src import compat

# The algorithms of lax's convolutions for fprop, dgrad and wgrad, or None if they stay lax's: a
# global and a thread-local value. Both are part of JAX's cache keys, so no program compiled under
# one value is reused under another.
override_in_force = jax.make_user_context(None)

# The mark of operations traced within an override: JAX keeps an operation's XLA metadata from
# tracing to lowering, and passes it to derivatives. "off" leaves them to lax.
_MARK, _OFF = "jaxconv_override", "off"


def marked(algorithms: tuple[str, str, str] | None):
    """A context that marks traced lax convolutions for computation by these algorithms."""
    return compat.set_xla_metadata(**{_MARK: ",".join(algorithms) if algorithms else _OFF})


def algorithms_of_lax() -> tuple[str, str, str] | None:
    """The algorithms for the lax convolution being lowered, or None for lax's own."""
    mark = compat.xla_metadata_in_force().get(_MARK)
    if mark is None:
        return override_in_force.value
    if mark == _OFF:
        return None
    fprop, dgrad, wgrad = mark.split(",")
    return fprop, dgrad, wgrad


# Whether `fuse` may change programs that this thread traces; None if unset. Operations traced
# within an override are marked, as for the algorithms above.
fuse_in_force = jax.make_user_context(None)
_FUSE_MARK, _ON = "jaxconv_fuse", "on"


def marked_for_fuse(enabled: bool):
    """A context that marks traced convolutions as available to ``fuse``, or not."""
    return compat.set_xla_metadata(**{_FUSE_MARK: _ON if enabled else _OFF})


def may_fuse(eqn: Any) -> bool:
    """Whether ``override`` allows ``fuse``, called here, to change an equation."""
    mark = compat.metadata(eqn).get(_FUSE_MARK)
    return mark == _ON if mark is not None else fuse_in_force.value is not False


@contextlib.contextmanager
def left_to_lax():
    """A context in which traced and lowered lax convolutions stay lax's."""
    mark = marked(None) if _MARK in compat.xla_metadata_in_force() else contextlib.nullcontext()
    with override_in_force(None), mark:
        yield
