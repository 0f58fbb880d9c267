"""Slurm's commands as functions: what they send, what they read, and how a command fails. The commands are scripts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.errors import UserError
from agentrl.placement.slurm import slurm_commands
from agentrl.placement.slurm.slurm_commands import Job

Script = Callable[[str, str], None]


def test_without_slurm_the_command_is_named(script: Script) -> None:
    with pytest.raises(UserError, match=r"^no squeue here: start the run where Slurm's commands are$"):
        slurm_commands.find_job("run")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo one >&2; echo 'sbatch: error: bad QOS' >&2; exit 1", "sbatch: sbatch: error: bad QOS"),
        ("echo 'no such partition'; exit 1", "sbatch: no such partition"),
        ("exit 3", "sbatch: status 3"),
    ],
)
def test_a_command_that_fails_says_its_last_line(script: Script, text: str, said: str) -> None:
    script("sbatch", text)
    with pytest.raises(UserError) as failed:
        slurm_commands.check("#!/bin/sh")
    assert str(failed.value) == said


def test_a_command_that_does_not_answer_is_ended(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_commands, "TIMEOUT_S", 0.1)
    os.mkfifo(tmp_path / "never")
    script("scancel", f"exec cat {tmp_path}/never")
    with pytest.raises(UserError, match=r"^scancel: no answer after 0\.1 s$"):
        slurm_commands.cancel("7")


def test_slurm_reads_a_script_that_it_only_tests(script: Script, tmp_path: Path) -> None:
    script("sbatch", f'echo "$*" > {tmp_path}/args; cat > {tmp_path}/text')
    slurm_commands.check("#!/bin/sh\necho it's")
    assert (tmp_path / "args").read_text() == "--test-only\n"
    assert (tmp_path / "text").read_text() == "#!/bin/sh\necho it's"


@pytest.mark.parametrize(("printed", "id"), [("123", "123"), ("123;cluster", "123")])
def test_a_submitted_job_has_an_id(script: Script, tmp_path: Path, printed: str, id: str) -> None:
    script("sbatch", f'echo "$*" > {tmp_path}/args; echo "{printed}"')
    assert slurm_commands.submit(tmp_path / "job.sh") == id
    assert (tmp_path / "args").read_text() == f"--parsable --export=NIL {tmp_path}/job.sh\n"


@pytest.mark.parametrize(
    ("queue", "job"),
    [
        ("", None),
        ("1|COMPLETING|None", None),
        ("1|PENDING|Resources", Job("1", "PENDING", "Resources")),
        ("1|PENDING|Priority\n2|RUNNING|None", Job("2", "RUNNING", "None")),
        ("1|COMPLETING|None\n2|PENDING|a|b", Job("2", "PENDING", "a|b")),
    ],
)
def test_the_job_that_runs_is_found_before_one_that_waits(script: Script, queue: str, job: Job | None) -> None:
    script("squeue", f'[ "$3" = --name=run ] && cat <<END\n{queue}\nEND' if queue else "")
    assert slurm_commands.find_job("run") == job
    assert job is None or job.waits is (job.state == "PENDING")


def test_steps_are_known_by_their_names(script: Script) -> None:
    script("squeue", "[ $3 = --jobs=7 ] && printf 'proxy-0|n1\\nengine-0-0|n[2-3]\\n'")
    assert slurm_commands.steps("7") == {"proxy-0": "n1", "engine-0-0": "n[2-3]"}


def test_a_jobs_script_is_asked_to_end_or_all_of_it_is_ended(script: Script, tmp_path: Path) -> None:
    script("scancel", f'echo "$*" >> {tmp_path}/args')
    slurm_commands.signal_script("7")
    slurm_commands.cancel("7")
    assert (tmp_path / "args").read_text() == "--batch --signal=TERM 7\n7\n"


def test_slurm_gets_none_of_the_runs_secrets(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_ADMIN_KEY", "secret")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    script("scancel", f'echo "$SBATCH_ACCOUNT/$AGENTRL_ADMIN_KEY" > {tmp_path}/env')
    slurm_commands.cancel("7")
    assert (tmp_path / "env").read_text() == "mine/\n"
