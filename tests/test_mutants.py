"""scripts/mutants.toml: every file that it names is there, and every test."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GROUPS = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text())


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_names_modules_and_tests_that_exist(group: str) -> None:
    for module in GROUPS[group]["modules"]:
        assert (ROOT / module).is_file()
    for test in GROUPS[group]["tests"]:
        path, _, function = re.sub(r"\[.*", "", test).partition("::")
        assert (ROOT / path).exists()
        assert not function or f"def {function}(" in (ROOT / path).read_text()
