"""The probe finds a storage that cannot be written, or that answers wrongly, and leaves nothing in a good one."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.configs.config_files import parse_config
from agentrl.errors import StorageError, UserError
from agentrl.launch.run_lifecycle import check_agent
from agentrl.storage.storage_probe import probe

RUN = {"name": "r", "model": "tiny", "agent": "agentrl.agents.reverse:ReverseAgent"}
TASKS = {"tasks": "agentrl.agents.reverse:train_tasks"}


def test_the_probe_leaves_a_good_storage_unchanged(store):
    probe(store)
    assert store.names("") == []


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("read", b"x", "has other content"),
        ("names", [], "is not listed"),
        ("delete", None, "is still there"),
    ],
)
def test_the_probe_finds_a_wrong_answer(store, monkeypatch, method, answer, said):
    with monkeypatch.context() as patch:
        patch.setattr(type(store), method, lambda *args: answer)
        with pytest.raises(StorageError, match=said):
            probe(store)


def test_doctor_says_how_a_storage_is(bucket):
    done = CliRunner().invoke(app, ["doctor", "--storage", bucket])
    assert done.exit_code == 0
    assert done.output == f"{bucket}: an object was written, read, listed and deleted\n"


def test_doctor_names_the_fault(s3):
    done = CliRunner().invoke(app, ["doctor", "--storage", "s3://absent-bucket"])
    assert isinstance(done.exception, StorageError)
    assert "cannot write s3://absent-bucket/.agentrl-probe-" in str(done.exception)
    done = CliRunner().invoke(app, ["doctor", "--storage", "memory://a"])
    assert isinstance(done.exception, UserError)
    assert str(done.exception).startswith("--storage: must be s3://BUCKET/PREFIX or file:///FOLDER")
    done = CliRunner().invoke(app, ["doctor", "--storage", "s3://a", "--session", "b"])
    assert str(done.exception) == "give one of --session ID, --storage URL and -- COMMAND"


def test_a_run_tries_its_storage_before_anything_starts(bucket):
    check_agent(parse_config(RUN | TASKS | {"storage": {"url": bucket}}))
    with pytest.raises(StorageError, match="cannot write s3://absent-bucket"):
        check_agent(parse_config(RUN | TASKS | {"storage": {"url": "s3://absent-bucket"}}))
