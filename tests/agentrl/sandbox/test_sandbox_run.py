"""Code in a sandbox: what it can do, and what it cannot."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import psutil
import pytest

from agentrl.errors import UserError
from agentrl.sandbox import Limits, Result, run, run_python
from agentrl.sandbox.isolation import ISOLATIONS, Isolation, choose, works


@pytest.fixture(params=ISOLATIONS)
def isolation(request: pytest.FixtureRequest) -> Isolation:
    kind: Isolation = request.param
    if (reason := works(kind)) is not None:
        absent = "no isolation by bubblewrap" if kind == "bubblewrap" else "no isolation by landlock"
        pytest.skip(f"{absent}: {reason}")
    return kind


async def python(isolation: Isolation, source: str, time_s: float = 10.0, **limits: int) -> Result:
    return await run_python(source, isolation=isolation, limits=Limits(time_s=time_s, **limits))  # type: ignore[arg-type]


async def test_a_program_has_its_files_and_its_input(isolation: Isolation) -> None:
    source = (
        "import sys, lib.part\nopen('out', 'w').write('x')\nprint(lib.part.N, sys.stdin.read(), open('out').read())"
    )
    done = await run_python(source, stdin="in", files={"lib/part.py": "N = 7"}, isolation=isolation)
    assert (done.ended, done.status, done.stdout, done.stderr) == ("exit", 0, "7 in x\n", "")
    assert done.ok


async def test_an_exit_status_and_a_signal_are_told(isolation: Isolation) -> None:
    assert (await run(["sh", "-c", "echo no >&2; exit 3"], isolation=isolation)).status == 3
    killed = await python(isolation, "import os; os.kill(os.getpid(), 9)")
    assert killed.status == 137
    assert not killed.ok


async def test_there_is_no_network(isolation: Isolation) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = await python(isolation, f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
    assert "OSError" in done.stderr or "Refused" in done.stderr or "unreachable" in done.stderr


def open_secret(folder: Path) -> Path:
    """A file that everybody may read and write."""
    folder.chmod(0o777)
    secret = folder / "secret"
    secret.write_text("hidden")
    secret.chmod(0o666)
    return secret


async def test_other_files_can_be_neither_read_nor_written(isolation: Isolation, tmp_path: Path) -> None:
    secret = await asyncio.to_thread(open_secret, tmp_path)
    source = f"""
import os
def fails(action):
    try:
        action()
    except OSError:
        return True
print(all(fails(lambda p=p: open(p)) for p in ({str(secret)!r}, "/etc/shadow", {__file__!r})))
places = "/tmp", "/dev/shm", "/usr", "/etc", "/", "/run", "/var/tmp", {str(tmp_path)!r}
print(all(fails(lambda p=p: open(p + "/new", "w")) for p in places))
"""
    done = await python(isolation, source)
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert await asyncio.to_thread(secret.read_text) == "hidden"


async def test_it_sees_no_other_process_and_none_of_our_variables(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_RUN_KEY", "k-secret")
    done = await python(
        isolation,
        "import os; print(len([n for n in os.listdir('/proc') if n.isdigit()]), 'AGENTRL_RUN_KEY' in os.environ)",
    )
    count, has_key = done.stdout.split()
    assert int(count) < 10
    assert has_key == "False"


async def test_it_cannot_become_more_powerful(isolation: Isolation) -> None:
    done = await python(
        isolation,
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapBnd', 'NoNewPrivs'))])",
    )
    zero = "0" * 16
    assert done.stdout.strip() == str([zero, zero, "1"])
    assert not (
        await run(["unshare", "--user", "--map-root-user", "mount", "-t", "tmpfs", "none", "/usr"], isolation=isolation)
    ).ok


async def test_a_fork_bomb_is_bounded_and_ends(isolation: Isolation) -> None:
    source = """
import os, time
n = 0
try:
    while True:
        if not os.fork():
            time.sleep(60)
        n += 1
except OSError:
    print(n)
"""
    done = await python(isolation, source, processes=20)
    assert 0 < int(done.stdout) <= 20
    assert done.wall_s < 8


async def test_memory_files_and_output_are_bounded(isolation: Isolation) -> None:
    big = await python(isolation, "bytearray(2**31)", memory_mb=256)
    assert "MemoryError" in big.stderr
    full = await python(isolation, "for n in range(100): open(str(n), 'wb').write(bytes(2**20))", disk_mb=4)
    assert "No space left" in full.stderr
    flood = await python(isolation, "while True: print('x' * 1000)", output_bytes=5000)
    assert (flood.ended, len(flood.stdout), flood.status) == ("output", 5000, None)


async def test_time_is_bounded_and_nothing_is_left(isolation: Isolation) -> None:
    source = """
import subprocess, time
subprocess.Popen(["sleep", "987654"], start_new_session=True)
print("on", flush=True)
time.sleep(60)
"""
    done = await python(isolation, source, 1.0)
    assert (done.ended, done.stdout) == ("time", "on\n")
    assert done.wall_s < 8
    deadline = time.monotonic() + 20  # the kernel ends a namespace's processes after its first one

    def left() -> list[psutil.Process]:
        return [p for p in psutil.process_iter(["cmdline"]) if "987654" in (p.info["cmdline"] or [])]

    while left() and time.monotonic() < deadline:  # noqa: ASYNC110 - it is about other processes
        await asyncio.sleep(0.05)
    assert left() == []


async def test_a_cancelled_command_ends(isolation: Isolation) -> None:
    task = asyncio.create_task(run(["sleep", "987653"], isolation=isolation))
    deadline = time.monotonic() + 20

    def sleeping() -> list[psutil.Process]:
        return [
            p
            for p in psutil.process_iter(["cmdline", "name"])
            if p.info["name"] == "sleep" and "987653" in (p.info["cmdline"] or [])
        ]

    while not sleeping() and time.monotonic() < deadline:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.02)
    assert sleeping()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    while sleeping() and time.monotonic() < deadline + 20:  # noqa: ASYNC110 - if its guard was just starting
        await asyncio.sleep(0.02)
    assert sleeping() == []


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", "a/../../x"])
async def test_files_stay_in_the_folder(name: str) -> None:
    with pytest.raises(UserError, match="not a path inside"):
        await run(["true"], files={name: "x"})


def test_an_isolation_that_does_not_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    works.cache_clear()
    with pytest.raises(UserError, match=r"cannot be isolated .*bwrap is not installed; landlock: unshare is not"):
        choose()
    works.cache_clear()
