"""The proxy of the contract: one for all tests, except those in which an engine fails."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def proxy(shared_proxy: Any) -> Any:
    return shared_proxy
