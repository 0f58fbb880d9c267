"""`agentrl doctor` as a command: what it prints, where, and its exit status."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forks import ran

_spec = importlib.util.spec_from_file_location("doctor_conftest", Path(__file__).parents[1] / "doctor" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
database_kind, run_config, store_url, proxy = (
    getattr(_shared, name) for name in ("database_kind", "run_config", "store_url", "proxy")
)

ASK = """
import json, os, urllib.request
head = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head), timeout=30))
print("played")
"""


def doctor(*args: str, columns: str | None = "80") -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("AGENTRL_") and k != "COLUMNS"}
    env |= {"COLUMNS": columns} if columns else {}
    return ran(["doctor", *args], env)


def play(proxy: Any, program: str, *args: str) -> subprocess.CompletedProcess[str]:
    return doctor("--proxy", proxy.url, "--key", "run-key", *args, "--", sys.executable, "-c", program)


def test_a_command_is_examined_and_its_session_can_be_examined_later(proxy, store_url):
    played = play(proxy, ASK)
    assert played.returncode == 0, played.stdout + played.stderr
    assert played.stdout.startswith("played\n")
    assert "exit status 0\ntrainable\n" in played.stdout
    assert max(map(len, played.stdout.splitlines())) <= 80
    found = re.search(r"session ([0-9a-f]{32})", played.stdout)
    assert found is not None
    again = doctor("--session", found[1], "--database", store_url)
    assert again.returncode == 0, again.stderr
    assert "● 1" in again.stdout
    assert "abandoned" in again.stdout


def test_without_a_terminal_no_line_is_broken(proxy):
    edited = '"hello"}, {"role": "assistant", "content": "never said"}, {"role": "user", "content": "x"'
    program = ASK + ASK.replace('"hello"', edited)
    played = doctor("--proxy", proxy.url, "--key", "run-key", "--", sys.executable, "-c", program, columns=None)
    lines = played.stdout.splitlines()
    assert any(line.startswith("call 2 forks (history edited): the client edited message 2") for line in lines)
    assert max(map(len, lines)) > 80
    assert not any(len(line) > 2000 for line in lines), "lines are not filled up with blanks"


def test_a_missing_command_starts_nothing(tmp_path: Path):
    told = doctor("--model", str(tmp_path / "no-model"), "--", "no-such-program")
    line = "agentrl: cannot run 'no-such-program': No such file or directory\n"
    assert (told.returncode, told.stderr) == (2, line)


def test_with_json_stdout_holds_only_the_report(proxy):
    played = play(proxy, ASK + "raise SystemExit(3)", "--json")
    assert played.returncode == 1
    assert played.stderr == "played\n"
    report = json.loads(played.stdout)
    assert (report["command_status"], report["verdict"]["answer"]) == (3, "trainable, with problems")
    assert [call["number"] for call in report["calls"]] == [1]
    assert report["figures"]["ids"] == 1.0


def test_mistakes_are_one_line(proxy, store_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nowhere = f"which run? {tmp_path}/runs has no runs: give --run FOLDER, or --database-url (AGENTRL_DATABASE_URL)"
    for args, line in [
        ((), "give one of --session ID, --storage URL and -- COMMAND"),
        (("--session", "x", "--", "true"), "give one of --session ID, --storage URL and -- COMMAND"),
        (("--session", "x"), nowhere),
        (("--session", "x", "--database-url", store_url), "--session: the database has no session 'x'"),
        (("--proxy", proxy.url, "--", "true"), "--proxy needs the run's key: give --key or set AGENTRL_RUN_KEY"),
        (("--proxy", proxy.url, "--key", "wrong", "--", "true"), "the API key is not valid"),
        (
            ("--proxy", proxy.url, "--key", "run-key", "--", "no-such-program"),
            "cannot run 'no-such-program': No such file or directory",
        ),
    ]:
        told = doctor(*args)
        assert (told.returncode, told.stderr) == (2, f"agentrl: {line}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_command_and_abandons_the_session(proxy, tmp_path: Path, number):
    mark = tmp_path / "pid"
    program = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    command = [sys.executable, "-m", "agentrl", "doctor", "--proxy", proxy.url, "--key", "run-key", "--"]
    process = subprocess.Popen(
        [*command, sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (mark.exists() and mark.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert told == "stopped: the command and the processes started for it have ended\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
    assert proxy.get("/api/run")["running"] == 0
