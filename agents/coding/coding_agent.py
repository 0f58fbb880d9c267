"""A coding agent in a scratch repository: it gets a task, works with its own tools, and its tests give the reward.

    task ─► files in an empty folder ─► the program, unchanged, with the session's URL and key ─► tests in a sandbox

Where bubblewrap is installed, the program can write to its folder and its home only. It has the network, and can read
this machine's files: run it in a container if that matters.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl import UserError
from agentrl.agents.coding.coding_programs import CodingProgram, program_of
from agentrl.processes import children
from agentrl.rollout.command import check, environment
from agentrl.sandbox import Limits, run_python
from agentrl.sandbox.isolation import choose

MOST_FILES, MOST_BYTES = 500, 4 * 2**20
"""Limits on the files that are read from a repository for its tests."""
TEST_LIMITS = Limits(time_s=20.0, memory_mb=1024)
SHARED_TMP = Path("/tmp")
RUNNER = """import runpy
runpy.run_path({!r}, run_name="__main__")
print(end={!r})
"""
"""Says that a test has come to its end: a module that exits makes no test pass."""


class CodingAgent:
    """Tasks have `prompt`, and two mappings of paths to texts: `files`, the repository, and `tests`.

    `program` is `claude`, `codex`, `mini`, or the command of another program as a list, with `{prompt}`. The reward is
    the share of the files in `tests` that run without an error.
    """

    def __init__(self, program: str | list[str] = "claude", time_s: float = 600.0) -> None:
        self.program, self.time_s = program_of(program), time_s
        check(self.program.command[:1])

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        """Let the program work, then run the tests."""
        with tempfile.TemporaryDirectory(prefix="agentrl-coding-", ignore_cleanup_errors=True) as folder:
            home, work = Path(folder, "home"), Path(folder, "work")
            words = {
                "prompt": data["prompt"],
                "url": extra["base_url"].removesuffix("/v1"),
                "key": extra["api_key"],
                "home": str(home),
            }
            write(work, data["files"])
            write(home, {path: filled(text, words) for path, text in self.program.home.items()})
            await self._work(self.program, words, home, work, environment(extra["base_url"], extra["api_key"]))
            repository = await asyncio.to_thread(read, work)
        return await passed(repository, data["tests"])

    async def _work(
        self, program: CodingProgram, words: Mapping[str, str], home: Path, work: Path, env: Mapping[str, str]
    ) -> None:
        """Run the program until it ends or its time is over. Its exit status does not count: the tests do."""
        own = {name: filled(text, words) for name, text in program.env.items()}
        command = [filled(word, words) for word in program.command]
        command = [*confinement(home, work, command[0]), *command]
        with (home / "output.log").open("wb") as log:
            process = await children.start(command, env={**env, "HOME": str(home), **own}, stdout=log, stderr=log)
        try:
            async with asyncio.timeout(self.time_s):
                await process.wait()
        except TimeoutError:
            pass  # what it has done until now counts
        finally:
            if process.returncode is None:
                await asyncio.shield(children.stop(process))


def confinement(home: Path, work: Path, program: str) -> Sequence[str]:
    """The words before a command that make `work` its folder, and all others but `home` read-only where possible.

    The program has a /tmp of its own, in which it finds its installation if that lies in /tmp.
    """
    if choose(None) != "bubblewrap":
        return ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(work)]
    fixed = ["--die-with-parent", "--unshare-pid", "--unshare-ipc", "--ro-bind", "/", "/", "--dev", "/dev"]
    found = Path(shutil.which(program) or program)
    if found.is_relative_to(SHARED_TMP):
        top = str(SHARED_TMP / found.relative_to(SHARED_TMP).parts[0])
        installed = ["--ro-bind", top, top]
    else:
        installed = []
    writable = ["--proc", "/proc", "--tmpfs", str(SHARED_TMP), *installed]
    writable += ["--bind", str(home), str(home), "--bind", str(work), str(work)]
    return ["bwrap", *fixed, *writable, "--chdir", str(work)]


async def passed(repository: Mapping[str, bytes], tests: Mapping[str, str]) -> float:
    """The share of the tests that run without an error in the repository. They replace its own files."""
    files = {**repository, **tests}
    finished = secrets.token_hex(16)
    results = [await run_python(RUNNER.format(test, finished), files=files, limits=TEST_LIMITS) for test in tests]
    return sum(result.ok and result.stdout.endswith(finished) for result in results) / len(results)


def read(folder: Path) -> dict[str, bytes]:
    """The files of a repository, without links. Raises UserError for a large one."""
    found: dict[str, bytes] = {}
    left = MOST_BYTES
    for directory, _, names in os.walk(folder):
        for path in (Path(directory, name) for name in names):
            if path.is_symlink() or not path.is_file():
                continue
            left -= path.stat().st_size
            if left < 0 or len(found) == MOST_FILES:
                raise UserError(f"the repository has more than {MOST_FILES} files or {MOST_BYTES:,} bytes")
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files by their paths in `folder`. Raises UserError for a path that leads out of it."""
    folder.mkdir()
    for name, text in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"files: {name!r} leads out of the repository")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def filled(text: str, words: Mapping[str, str]) -> str:
    """The text with each `{word}` that `words` has filled in; other braces stay."""
    return re.sub(rf"\{{({'|'.join(words)})\}}", lambda match: words[match[1]], text)
