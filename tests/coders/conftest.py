"""The environment of coding agents, and a proxy in front of a scripted engine for them to work with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from databases import Databases

sys.path.insert(0, str(Path(__file__).parent))  # for `import desk` and `import apprentice`

import apprentice
from apprentice import Script
from desk import Desk, at_work, furnished

from agentrl.testing import FakeEngine

CODERS = Path(__file__).parents[2] / ".venv-coders" / "bin"


@pytest.fixture(scope="session")
def coders() -> Path:
    """Where `claude`, `codex`, `mini` and `python` are. Tests are skipped without it, but in CI (absences.py)."""
    if not (CODERS / "claude").exists():
        pytest.skip("no .venv-coders: run `make setup-coders`")
    return CODERS


@pytest.fixture(scope="session")
def apprentice_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The apprentice's tokenizer and configuration, without weights: enough for a proxy."""
    folder = tmp_path_factory.mktemp("apprentice")
    apprentice.write_folder(folder)
    return folder


@pytest.fixture(scope="session")
def scripted(coders: Path, apprentice_folder: Path, databases: Databases) -> Iterator[tuple[Desk, Script]]:
    """A proxy whose engine gives the script's answers."""
    script = Script(apprentice_folder)
    with (
        databases.lent("sqlite") as url,
        FakeEngine(script.respond, context_length=apprentice.CONTEXT_LENGTH) as engine,
        at_work(url, apprentice_folder, engine.url) as desk,
    ):
        yield desk, script


@pytest.fixture
def script(scripted: tuple[Desk, Script]) -> Script:
    """What the scripted engine answers by: the apprentice's job, until a test gives it another one."""
    _, found = scripted
    found.next_line = apprentice.next_line
    return found


@pytest.fixture
def desk(scripted: tuple[Desk, Script], script: Script, tmp_path: Path) -> Desk:
    """The scripted engine's desk with a folder and a home of the test's own."""
    return furnished(scripted[0], tmp_path)
