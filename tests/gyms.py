"""Tests that need reasoning-gym, TextArena and Gymnasium: `pytestmark = needs_gyms`."""

from __future__ import annotations

import importlib.util

import pytest

needs_gyms = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="no reasoning-gym: run `make setup-gyms`"
)
