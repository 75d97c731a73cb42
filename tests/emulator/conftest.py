"""Fixtures that the tests of the emulator share."""

from __future__ import annotations

from emulated_cases import programs  # noqa: F401 (a fixture)
