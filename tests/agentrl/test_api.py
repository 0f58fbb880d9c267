"""`from agentrl import …`: complete, lazy, light, documented, and refused with a hint."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", agentrl.__all__)
def test_every_public_name_is_that_of_its_module(name: str) -> None:
    value = getattr(agentrl, name)
    module = agentrl._MODULES.get(name, "agentrl.version")
    assert value is getattr(importlib.import_module(module), name)
    assert name in dir(agentrl)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(str(agentrl.__file__)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    found = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    imported = {name.name: node.module for node in found for name in node.names}
    assert imported == agentrl._MODULES
    assert set(agentrl.__all__) == {*imported, "__version__"}
    assert agentrl.__all__ == sorted(agentrl.__all__)


def test_the_docs_list_every_name() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(agentrl.__all__)


def test_importing_agentrl_loads_no_other_module_of_it() -> None:
    probe = "import sys, agentrl; print(sorted(name for name in sys.modules if name.startswith('agentrl')))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == ["agentrl", "agentrl.version"]


def test_no_public_name_needs_torch() -> None:
    probe = "import sys\nfrom agentrl import *\nprint(RunConfig, {'torch', 'sqlalchemy', 'fastapi'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == f"{agentrl.RunConfig} set()\n"


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(AttributeError, match="module 'agentrl' has no attribute 'Cleint'; did you mean 'Client'"):
        agentrl.Cleint  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Cleint' from 'agentrl'"):
        from agentrl import Cleint  # noqa: F401


def test_submodules_are_not_names_of_the_api() -> None:
    probe = "import agentrl; assert not hasattr(agentrl, 'credit')\nfrom agentrl import client; print(client.__name__)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "agentrl.client\n"
