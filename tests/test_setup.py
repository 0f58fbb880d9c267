"""scripts/environment.py: which torch it takes, and what makes it build anew."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "environment.py"


@pytest.fixture
def environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(version: str) -> dict[str, Any]:
    return {"install": [{"metadata": {"version": version}}]}


@pytest.mark.parametrize("offer", [report("2.13.0"), report("2.13.0+cu130"), None])
def test_a_cuda_build_is_never_taken(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], offer: Any
) -> None:
    monkeypatch.setattr(environment, "pip_report", lambda python, pin: offer)
    monkeypatch.setattr(environment.sys, "platform", "linux")
    torch, options = environment.choose_torch("python", "torch==2.13.0")
    assert torch == "torch==2.13.0+cpu"
    assert options == ["--extra-index-url", environment.TORCH_CPU_INDEX]
    assert "200 MB" in capsys.readouterr().out  # said before it is downloaded


def test_the_cpu_build_that_pip_is_configured_for_is_taken(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "pip_report", lambda python, pin: report("2.13.0+cpu"))
    assert environment.choose_torch("python", "torch==2.13.0") == ("torch==2.13.0+cpu", [])


def test_another_lock_is_another_environment(environment: ModuleType, tmp_path: Path) -> None:
    changed = tmp_path / "cpu.lock"
    changed.write_text(environment.LOCKS["main"].read_text() + "one-more==1\n")
    keys = {environment.key(lock_file) for lock_file in (changed, *environment.LOCKS.values())}
    assert len(keys) == 1 + len(environment.LOCKS)


def test_another_npm_lock_is_another_environment(environment: ModuleType, tmp_path: Path) -> None:
    lock, changed = environment.NPM_FOLDERS["coders"] / "package-lock.json", tmp_path / "package-lock.json"
    changed.write_text(lock.read_text().replace('"version": "', '"version": "9'))
    python = environment.LOCKS["coders"]
    assert environment.key(python, lock) != environment.key(python, changed)


def test_no_lock_names_a_registry(environment: ModuleType) -> None:
    locks = [
        *environment.LOCKS.values(),
        *(folder / "package-lock.json" for folder in environment.NPM_FOLDERS.values()),
    ]
    for lock in locks:
        named = [line for line in lock.read_text().splitlines() if "://" in line and not line.startswith("#")]
        assert named == []


def test_npm_packages_need_npm(environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(environment.SetupError, match="npm"):
        environment.build_shared(tmp_path / "shared", [], 0, environment.NPM_FOLDERS["coders"])
    assert not (tmp_path / "shared").exists()


def test_a_link_is_made_once_and_moves_with_its_environment(environment: ModuleType, tmp_path: Path) -> None:
    path, first, second = (tmp_path / name for name in (".venv-agents", "first", "second"))
    first.mkdir()
    assert environment.link(path, first)
    assert not environment.link(path, first)
    assert environment.link(path, second)
    assert path.readlink() == second


def test_packages_are_added_behind_those_of_the_shared_environment(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    with pytest.raises(environment.SetupError, match="run `make setup` first"):
        environment.add_packages("gyms", tmp_path / "gyms")
    site_packages = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    site_packages.mkdir(parents=True)
    (tmp_path / ".venv" / "bin").mkdir()
    (tmp_path / ".venv" / "bin" / "agentrl").touch()
    for name in ("shared", "gyms"):
        (tmp_path / name / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    assert environment.point("agentrl_shared_env.pth", tmp_path / "shared")
    assert environment.add_packages("gyms", tmp_path / "gyms")
    assert not environment.add_packages("gyms", tmp_path / "gyms")
    lines = [path.read_text().split("/")[-4] for path in sorted(site_packages.glob("*.pth"))]
    assert lines == ["shared", "gyms"]


def test_a_folder_in_the_place_of_the_link_is_left_alone(environment: ModuleType, tmp_path: Path) -> None:
    (tmp_path / ".venv-agents").mkdir()
    with pytest.raises(environment.SetupError, match="remove it"):
        environment.link(tmp_path / ".venv-agents", tmp_path / "shared")


def test_pins_are_read_without_comments(environment: ModuleType) -> None:
    assert environment.read_pins("# head\na==1  # why\n\nb==2\n") == ["a==1", "b==2"]
    assert environment.read_pins("a==1 \\\n    --hash=x \\\n    --hash=y\nb==2\n") == ["a==1 --hash=x --hash=y", "b==2"]


def test_every_pin_has_the_hashes_of_its_files_but_for_torch(environment: ModuleType) -> None:
    for lock_file in (*environment.LOCKS.values(), SCRIPT.parent.parent / "requirements" / "gpu.lock"):
        for pin in environment.read_pins(lock_file.read_text()):
            assert re.fullmatch(r"torch==\S+|\S+==\S+( --hash=sha256:[0-9a-f]{64})+", pin), pin


def test_torch_is_installed_alone_and_all_else_by_its_hashes(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[tuple[list[str], list[str]]] = []

    def install(python: str, calls: list[list[str]], shared: Path, *_: Any) -> None:
        shared.mkdir(exist_ok=True)
        for arguments in calls:
            file = arguments[2:] if arguments[0] == "--require-hashes" else []
            found.append((arguments, [line for name in file for line in Path(name).read_text().splitlines()]))

    monkeypatch.setattr(environment, "install", install)
    monkeypatch.setattr(environment, "run", lambda command, *_: None)
    monkeypatch.setattr(environment, "compile_all", lambda *_: None)
    monkeypatch.setattr(environment, "choose_torch", lambda python, pin: (f"{pin}+cpu", ["--extra-index-url", "x"]))
    environment.build_shared(tmp_path / "env", ["a==1 --hash=h", "torch==2", "b==2 --hash=h"], 0)
    (torch, _), *others = found
    assert torch == ["torch==2+cpu", "--extra-index-url", "x"]
    assert [pins for _, pins in others] == [["a==1 --hash=h"], ["b==2 --hash=h"]]


def test_a_machine_with_a_gpu_is_told_what_to_install(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert environment.gpu(tmp_path / "nvidia0") is environment.shutil.which("nvidia-smi")
    (tmp_path / "nvidia0").touch()
    assert environment.gpu(tmp_path / "nvidia0") == str(tmp_path / "nvidia0")
    monkeypatch.setattr(environment.sys, "argv", ["environment.py"])
    monkeypatch.setattr(environment, "CACHE", tmp_path)
    monkeypatch.setattr(environment, "build_shared", lambda shared, pins, lock, npm: None)
    monkeypatch.setattr(environment, "link_checkout", lambda shared: True)
    for found, said in (("/dev/nvidia0", True), (None, False)):
        monkeypatch.setattr(environment, "gpu", lambda found=found: found)
        assert environment.main() == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if ".[gpu,lora,postgres]" in line and "/dev/nvidia0" in line] == lines[1:]
        assert bool(lines[1:]) is said
