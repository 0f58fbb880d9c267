"""The processes of checkpoint-engine that send a version's files: what they are told, and those that fail.

The package refuses machines without a GPU, so it is a fake with its documented signatures.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.trainer.distributed import World
from agentrl.trainer.publish.engine_handles import Group, NoHandles, handles, new_group
from agentrl.trainer.publish.offers import Offers

FAKE = """
import json, os, sys, threading, time

class ParameterServer:
    def __init__(self, *, rank=None, world_size=None, auto_pg=True, gpu_count=None, mem_fraction=None,
                 master_addr=None, master_port=None):
        if "refuses" in os.environ["FAKE"]:
            raise TypeError("The current device type is not supported")
        self.calls = [["init", auto_pg]]
        self.env = {name: os.environ[name] for name in
                    ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PS_MAX_BUCKET_SIZE_GB")}

    def register_checkpoint(self, checkpoint_name, *, files=None, named_tensors=None, use_shared_memory_pool=False,
                            use_inplace_pin_memory=True):
        self.calls.append(["register", checkpoint_name, files, use_inplace_pin_memory])

    def gather_metas(self, checkpoint_name):
        self.calls.append(["gather", checkpoint_name])

    def update(self, checkpoint_name, req_func, *, timeout=None, ranks=None):
        if "hangs" in os.environ["FAKE"]:
            time.sleep(600)
        if "garbage" in os.environ["FAKE"]:
            print("[1, 2]", flush=True)
        sockets = [("GPU-0", "ipc://@checkpoint-engine-GPU-0-0.sock")]
        thread = threading.Thread(target=req_func, args=(sockets,))
        thread.start()
        thread.join()
        self.calls.append(["update", checkpoint_name])

    def unregister_checkpoint(self, checkpoint_name, force=False):
        with open(os.environ["SAID"], "w") as file:
            json.dump([self.env, self.calls], file)
        sys.exit("fails" in os.environ["FAKE"])
"""
SOCKETS = {"GPU-0": "ipc://@checkpoint-engine-GPU-0-0.sock"}
GROUP = Group("10.0.0.1", 29500, 2, 1 << 29, 60.0)


@pytest.fixture
def behaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how the fake behaves."""
    package = tmp_path / "packages" / "checkpoint_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "ps.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SAID", str(tmp_path / "said.json"))
    monkeypatch.setenv("FAKE", "works")
    return lambda how: monkeypatch.setenv("FAKE", how)


def test_a_rank_sends_its_files(behaves: Any, tmp_path: Path) -> None:
    with handles(GROUP, 1, "v3-c", [Path("/w/v3-c/model-2.safetensors")]) as found:
        assert found == SOCKETS
        assert not (tmp_path / "said.json").exists()  # it waits for the engines
    env, calls = json.loads((tmp_path / "said.json").read_text())
    assert env == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "PS_MAX_BUCKET_SIZE_GB": "0.5",
    }
    assert calls == [
        ["init", True],
        ["register", "v3-c", ["/w/v3-c/model-2.safetensors"], False],
        ["gather", "v3-c"],
        ["update", "v3-c"],
    ]


@pytest.mark.parametrize("how", ["refuses", "garbage"])
def test_a_process_that_gives_no_handles(behaves: Any, how: str) -> None:
    behaves(how)
    with (
        pytest.raises(NoHandles, match=r"gave no handles: is it installed \(pip install"),
        handles(GROUP, 0, "v1-a", []),
    ):
        pytest.fail("ready")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoHandles, match=r"agentrl\[checkpoint-engine\]"), handles(GROUP, 0, "v1-a", []):
        pytest.fail("ready")


def test_a_process_that_waits_for_an_engine_is_killed_in_time(behaves: Any) -> None:
    behaves("hangs")
    short = Group("127.0.0.1", 29500, 1, 1 << 29, 0.5)
    with pytest.raises(NoHandles, match="gave no handles"), handles(short, 0, "v1-a", []):
        pytest.fail("ready")


def test_a_process_that_fails_at_the_end(behaves: Any) -> None:
    behaves("fails")
    with pytest.raises(NoHandles, match="rank 0 ended with 1"), handles(GROUP, 0, "v1-a", []):
        pass


def test_a_failed_publish_kills_the_process(behaves: Any, tmp_path: Path) -> None:
    with pytest.raises(ConnectionError), handles(GROUP, 0, "v1-a", []):
        raise ConnectionError
    assert not (tmp_path / "said.json").exists()


def test_rank_0_offers_all_whole_files(behaves: Any, world: World, tmp_path: Path) -> None:
    folder = tmp_path / "v3-c"
    folder.mkdir()
    for name in ("model-1.safetensors", "model-2.safetensors", "config.json", "delta-00000-of-00001.bin"):
        (folder / name).touch()
    offers = Offers(world, lambda owners: pytest.fail("streamed"))
    group = new_group(offers.ranks, 1 << 29, 60.0)
    with offers.handed(folder, [{"url": "http://e0"}, {"url": "http://e1"}], group) as transfer:
        assert transfer == {
            "transport": "checkpoint_engine",
            "handles": SOCKETS,
            "engines": ["http://e0", "http://e1"],
            "timeout_s": 60.0,
        }
    _, calls = json.loads((tmp_path / "said.json").read_text())
    assert [Path(file).name for file in calls[1][2]] == ["model-1.safetensors", "model-2.safetensors"]


def test_the_package_takes_these_arguments() -> None:
    server = pytest.importorskip("checkpoint_engine.ps", reason="no package for this fabric").ParameterServer
    for name, text in re.findall(r"def (\w+)\(self, ([^)]*)\)", FAKE):
        wanted = re.findall(r"(\w+)(?==|,|$)", re.sub(r"=\w+", "=", text))
        assert list(inspect.signature(getattr(server, name)).parameters)[1:] == wanted, name
