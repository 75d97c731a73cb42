"""Checks a handler's errors about buffers and attributes that do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import pytest


def assert_refused(call: Callable[[], object], words: str = "") -> None:
    """Checks that the call fails because of its arguments, with ``words`` in the message."""
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        call()
    message = str(raised.value)
    assert re.search("INVALID_ARGUMENT|UNIMPLEMENTED", message) and words in message, message
