"""The renderer under contract."""

from __future__ import annotations

import pytest

from .contracted import Contracted
from .registered import RENDERERS, params


@pytest.fixture(scope="session", params=params(RENDERERS))
def contracted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Contracted:
    """Each renderer in turn."""
    if request.param not in _BUILT:
        _BUILT[request.param] = RENDERERS[request.param](tmp_path_factory.mktemp("contracted") / "model")
    return _BUILT[request.param]


_BUILT: dict[str, Contracted] = {}
"""By name. The tests of a process come in any order."""
