"""What an install gives: every folder of code is packaged, and the light commands stay light."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "sglang")


def folders_with_code() -> set[str]:
    """Import names of all folders that hold Python files; links and caches aside."""
    tops = {"agentrl": "agentrl"} | {name: f"agentrl.{name}" for name in ("proxy", "trainer", "agents", "migrations")}
    found = set()
    for top, import_name in tops.items():
        for file in (ROOT / top).rglob("*.py"):
            parts = file.parent.relative_to(ROOT / top).parts
            if not any((ROOT / top).joinpath(*parts[: i + 1]).is_symlink() for i in range(len(parts))):
                found.add(".".join([import_name, *parts]))
    return found


def test_packages_are_the_folders_with_code() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(declared) == folders_with_code()


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.argv = ['agentrl', '--help']\nfrom agentrl.cli.main import app; app(standalone_mode=False)",
        "import agentrl.proxy",
        "import agentrl.proxy.app",
        "import agentrl.client, agentrl.rollout, agentrl.engine.sglang.sglang_client, agentrl.models, agentrl.store",
    ],
    ids=["help", "proxy", "proxy-app", "core"],
)
def test_light_parts_do_not_import_torch(code: str) -> None:
    probe = f"{code}\nimport sys; print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_the_help_imports_neither_fastapi_nor_sqlalchemy() -> None:
    probe = "import sys, agentrl.cli.main; print([name for name in ('fastapi', 'sqlalchemy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


SERVICES = {"wandb", "trackio"}
"""Clients of services, and large: tests/trainer/metrics/test_metric_sinks.py has stand-ins for them."""

TRANSPORTS = {"mooncake-transfer-engine", "nixl", "checkpoint-engine"}
"""Packages for fabrics and GPUs: tests/agentrl/versions has stand-ins for them."""

OTHER_ENGINES = {"vllm"}
"""In an environment of its own, whose lock has a build for CPUs."""


def test_the_lock_pins_everything_that_pyproject_asks_for() -> None:
    import re

    def normalized(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    elsewhere = {"agentrl", *SERVICES, *TRANSPORTS, *OTHER_ENGINES}
    names = {normalized(re.split(r"[\[<>=]", line)[0]) for line in asked} - elsewhere
    lock = "".join((ROOT / "requirements" / name).read_text() for name in ("cpu.lock", "gyms.lock"))
    assert names <= {normalized(line.split("==")[0]) for line in lock.splitlines() if "==" in line}


def test_images_get_every_folder_with_code_and_every_lock_that_they_install() -> None:
    taken = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    assert {*folders, "pyproject.toml", "requirements/*.lock"} <= taken
    for name in ("Dockerfile", "Dockerfile.gpu"):
        locks = [word for word in (ROOT / name).read_text().split() if word.endswith(".lock")]
        assert locks
        assert [lock for lock in locks if not (ROOT / lock).exists()] == []
