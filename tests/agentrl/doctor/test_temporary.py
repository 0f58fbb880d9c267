"""Engine, proxy and database of one examination: started, used, gone. The engine is a fake in a process of its own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from agentrl.doctor import temporary
from agentrl.doctor.temporary import place
from agentrl.launch import parts
from agentrl.launch.part_process import Part, PartFailed
from agentrl.launch.parts import Plan

SERVE = """
import sys, threading
from agentrl.testing import FakeEngine
print("loading weights", flush=True)
FakeEngine(port=int(sys.argv[1])).start()
threading.Event().wait()
"""


def engine(program: str) -> object:
    """In place of SGLang: a Python program that gets its port."""

    def engines(plan: Plan) -> list[Part]:
        (port,) = plan.engine_ports
        log = plan.config.run_dir / "logs" / "engine-0.log"
        return [Part(name="engine-0", argv=[sys.executable, "-c", program, str(port)], log_file=log)]

    return engines


def started() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(temporary.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_temporary_proxy_serves_and_leaves_nothing(tiny_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "engines", engine(SERVE))
    news: list[tuple[float, str]] = []
    before = started()

    async def main() -> None:
        async with place(tiny_model, lambda s, line: news.append((s, line))) as where, httpx.AsyncClient() as http:
            http.headers["Authorization"] = f"Bearer {where.key}"
            session = (await http.post(f"{where.url}/sessions", json={})).json()
            asked = {"messages": [{"role": "user", "content": "hi"}]}
            reply = await http.post(f"{session['base_url']}/chat/completions", json=asked, timeout=30)
            assert reply.status_code == 200, reply.text

    asyncio.run(main())
    assert started() <= before
    assert list(folder.iterdir()) == []
    assert any(line == "loading weights" for _, line in news)


def test_a_dying_engine_is_reported_and_ends_all_other_processes(tiny_model: Path, folder: Path, monkeypatch):
    monkeypatch.setattr(parts, "engines", engine("import sys; sys.exit('no memory')"))
    before = started()

    async def main() -> None:
        async with place(tiny_model, lambda s, line: None):
            raise AssertionError("it never serves")

    with pytest.raises(BaseExceptionGroup) as told:
        asyncio.run(main())
    assert told.group_contains(PartFailed, match="engine-0 died 1 times, last with status 1: no memory")
    assert started() <= before
    assert list(folder.iterdir()) == []
