"""Answers that would run code are not given to generators that evaluate them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gyms import needs_gyms

from agentrl.environments.evaluated_answers import FORMULAS, LISTS, UNREADABLE, is_formula, readable
from agentrl.environments.reasoning_score import ReasoningScore
from agentrl.environments.reasoning_tasks import tasks


@pytest.mark.parametrize("text", ["['A', 'B']", "[[1, 0], [-1, 2.5]]", "A B\n_ Q", "Q _ _ _"])
def test_lists_and_boards_are_read(text: str) -> None:
    assert {readable(name, text) for name in LISTS} == {text}


@needs_gyms
@pytest.mark.parametrize("text", ["3 * (4 + 5) - 1/2", "x**3/3 + sin(2*x) + C", "-6*x^2 + 4xy", "log(x)*exp(-x1)", ""])
def test_formulas_are_read(text: str) -> None:
    assert is_formula(text)


@needs_gyms
@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('id')",
        "open(1)",
        "(exit)()",
        "().__class__",
        "x.real",
        "(1). real",
        "eval(chr(1))",
        "[1, print(2)]",
        "lambda: 1",
        "f'{1}'",
        "ｅval(1)",
    ],
)
def test_code_is_not_read(text: str) -> None:
    assert not is_formula(text)
    assert {readable(name, text) for name in FORMULAS} == {UNREADABLE}
    if "(" in text:
        assert {readable(name, text) for name in LISTS} == {UNREADABLE}
    assert readable("gcd", text) == text


@needs_gyms
@pytest.mark.parametrize("name", sorted(LISTS | FORMULAS))
def test_no_generator_runs_an_answer(name: str, tmp_path: Path) -> None:
    """Each with an answer that writes a file, bare and inside of what it reads."""
    config: dict[str, Any] = {"composite": {"config": {"datasets": [{"name": name}]}}} if name == "countdown" else {}
    (task,) = tasks(config or [name], size=1)
    file = tmp_path / "written"
    for code in (f"open({str(file)!r}, 'w')", f"[open({str(file)!r}, 'w')]", f"1 + open({str(file)!r}, 'w').fileno()"):
        assert ReasoningScore()(code, task) <= 0.05
    assert not file.exists()
