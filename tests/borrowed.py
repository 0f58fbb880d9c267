"""The fixtures of a running proxy (`tests/proxy/conftest.py`), for tests in other folders."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def proxy_fixtures(name: str) -> ModuleType:
    """The module that makes them, loaded anew as `name`: what one borrower changes in it no other sees."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "proxy" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
