"""The tree of files: names are unique, folders are small. Import contracts are in pyproject.toml (`make lint`)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("agentrl", "proxy", "trainer", "agents", "migrations")
PER_COMMAND = "agentrl/cli"
"""A command has one file, whatever the number of commands."""
MAX_FILES = 16


def product_files() -> list[Path]:
    files = [file.relative_to(ROOT) for name in PRODUCT for file in sorted((ROOT / name).rglob("*.py"))]
    return [file for file in files if not file.name.startswith("__")]


def test_no_two_files_have_one_name() -> None:
    names = Counter(file.name for file in product_files() if file.parent.name != "versions")
    assert [name for name, count in names.items() if count > 1] == []


def test_a_folder_holds_few_files() -> None:
    sizes = Counter(str(file.parent) for file in product_files() if file.parent.name != "versions")
    del sizes[PER_COMMAND]
    assert {folder: size for folder, size in sizes.items() if size > MAX_FILES} == {}


def test_every_folder_says_what_it_holds() -> None:
    folders = {file.parent for file in product_files()} - {Path("agents"), Path("migrations"), Path("proxy")}
    silent = [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").read_text().startswith('"""')]
    assert silent == []
