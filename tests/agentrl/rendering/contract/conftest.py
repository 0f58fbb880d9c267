"""The renderer under contract."""

from __future__ import annotations

import pytest

from .contracted import Contracted
from .registered import RENDERERS

PARAMS = [pytest.param(name, marks=[pytest.mark.long] if "its vocabulary" in name else []) for name in RENDERERS]
"""Renderers with a real vocabulary of 150,000 tokens are slow."""


@pytest.fixture(scope="session", params=PARAMS)
def contracted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Contracted:
    """Each renderer in turn."""
    if request.param not in _BUILT:
        _BUILT[request.param] = RENDERERS[request.param](tmp_path_factory.mktemp("contracted") / "model")
    return _BUILT[request.param]


_BUILT: dict[str, Contracted] = {}
"""By name. The tests of a process come in any order."""
