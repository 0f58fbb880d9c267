"""A host is refused, in one line, unless it sees the folder that the run's supervisor sees."""

from __future__ import annotations

import shutil
import socket

import pytest

from agentrl.errors import UserError
from agentrl.placement import folder_proof
from agentrl.placement.folder_proof import KEPT, TOKENS, add_token, check_token


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_proof, "SEEN_AFTER_S", 0.0)


def test_the_supervisors_folder_is_accepted_also_after_another_start(tmp_path):
    first = add_token(tmp_path)
    check_token(tmp_path, first)
    second = add_token(tmp_path)
    check_token(tmp_path, first)
    check_token(tmp_path, second)
    assert first != second


def test_a_copy_from_before_the_start_is_refused_with_host_and_folder(tmp_path):
    (tmp_path / "shared").mkdir()
    add_token(tmp_path / "shared")
    shutil.copytree(tmp_path / "shared", tmp_path / "copy")
    token = add_token(tmp_path / "shared")
    with pytest.raises(UserError) as refused:
        check_token(tmp_path / "copy", token)
    assert str(refused.value) == (
        f"host {socket.gethostname()} has another folder at {tmp_path}/copy than the run's supervisor: "
        "put runs_dir on storage that all hosts of the run share"
    )


def test_a_folder_without_tokens_is_refused(tmp_path):
    with pytest.raises(UserError, match="has another folder at"):
        check_token(tmp_path, "00")


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / TOKENS).mkdir()
    with pytest.raises(UserError, match=r"cannot read .*\.tokens \(Is a directory\)"):
        check_token(tmp_path, "00")


def test_a_part_without_a_token_needs_no_proof(tmp_path):
    check_token(tmp_path, None)


def test_the_token_may_become_visible_later(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_proof, "SEEN_AFTER_S", 600.0)
    waited: list[float] = []
    monkeypatch.setattr(folder_proof.time, "sleep", waited.append)
    monkeypatch.setattr(folder_proof, "_fault", lambda *_, answers=iter(["late", "late", None]): next(answers))
    check_token(tmp_path, "00")
    assert len(waited) == 2


def test_the_file_keeps_a_bounded_number_of_tokens(tmp_path):
    tokens = [add_token(tmp_path) for _ in range(KEPT + 3)]
    assert (tmp_path / TOKENS).read_text().split() == tokens[3:]
