"""The user's code: its functions' parameters, and the digest of its source."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl import user_code
from agentrl.errors import UserError
from agentrl.user_code import check_parameters, load_function, load_object, source_digest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_a_function_is_refused_that_cannot_be_called_as_it_will_be(folder: Path) -> None:
    (folder / "hooks_of_mine.py").write_text(
        "def good(tokens, totals, *, algorithm=None, **more): ...\nasync def later(*_): ...\ndef loss(*_): ...\nn = 1\n"
    )
    with pytest.raises(UserError, match=r"good\(tokens, totals, .*\) is called with \(tokens, totals, algorithm\)"):
        load_function("hooks_of_mine:good", "trainer.algorithm.loss")
    with pytest.raises(UserError, match="later must be a plain function"):
        load_function("hooks_of_mine:later", "trainer.algorithm.loss")
    with pytest.raises(UserError, match="'hooks_of_mine:n' is not a function"):
        load_function("hooks_of_mine:n", "rollout.accept")
    with pytest.raises(UserError, match=r"trainer.algorithm.loss: 'hooks_of_mine' has no 'los'; did you mean 'loss'"):
        load_function("hooks_of_mine:los", "trainer.algorithm.loss")
    assert load_function("hooks_of_mine:loss", "rollout.accept").__name__ == "loss"


@pytest.mark.parametrize("spec", ["", "hooks", ":f", "hooks:", "./hooks.py:f", "../hooks:f", ".hooks:f"])
def test_what_does_not_name_a_module_and_an_object_is_refused(folder: Path, spec: str) -> None:
    with pytest.raises(UserError) as refused:
        load_object(spec, "agent")
    assert str(refused.value) == f"agent: {spec!r} must look like module:name"


@pytest.mark.parametrize("spec", ["hooks.py:f", "my/hooks.py:f", "hooks..more:f"])
def test_a_module_that_does_not_exist_is_named(folder: Path, spec: str) -> None:
    with pytest.raises(UserError, match=r"^agent: cannot import '.*': No module named"):
        load_object(spec, "agent")


def test_builtins_without_a_signature_are_let_through() -> None:
    check_parameters(max, "rollout.accept")


def test_the_digest_of_a_module_is_of_its_file_and_imports_nothing(folder: Path) -> None:
    (folder / "plain_module.py").write_text("raise SystemExit\n")
    (folder / "other.py").write_text("1\n")
    before = source_digest("plain_module:f")
    (folder / "other.py").write_text("2\n")
    assert source_digest("plain_module:f") == before
    (folder / "plain_module.py").write_text("raise SystemExit(1)\n")
    assert source_digest("plain_module:f") not in (before, None)
    assert "plain_module" not in sys.modules


def test_the_digest_of_a_package_is_of_all_its_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = folder / "outer_package" / "inner"
    inner.mkdir(parents=True)
    for file in (inner.parent / "__init__.py", inner / "__init__.py", inner / "rewards.py", inner.parent / "help.py"):
        file.write_text("")
    before = source_digest("outer_package.inner.rewards:f")
    (inner.parent / "help.py").write_text("x = 1\n")
    after = source_digest("outer_package.inner.rewards:f")
    assert None not in (before, after)
    assert before != after
    monkeypatch.setattr(user_code, "MOST_FILES", 2)  # then the module alone counts
    alone = source_digest("outer_package.inner.rewards:f")
    (inner.parent / "help.py").write_text("x = 2\n")
    assert source_digest("outer_package.inner.rewards:f") == alone


def test_what_has_no_source_has_no_digest(folder: Path) -> None:
    assert source_digest("math:sqrt") is None
    assert source_digest("no_such_module:f") is None
    assert source_digest("json.no_such_part:f") is None
    (folder / "spaces").mkdir()
    (folder / "spaces" / "mine.py").write_text("")
    assert source_digest("spaces.mine:f") is not None
