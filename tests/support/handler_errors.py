"""What a handler says to buffers and attributes that do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import pytest


def assert_refused(call: Callable[[], object], words: str = "") -> None:
    """The call fails for its arguments, with these words."""
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        call()
    message = str(raised.value)
    assert re.search("INVALID_ARGUMENT|UNIMPLEMENTED", message) and words in message, message
