"""The logs of a run: which are shown, their last lines, and what is written later."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import UserError
from agentrl.launch.views import run_logs


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for name in ("engine-0", "engine-1", "proxy", "trainer-0"):
        (tmp_path / f"{name}.log").write_text(f"{name} a\n{name} b\n")
    return tmp_path


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], ["engine-0", "engine-1", "proxy", "trainer-0"]),
        (["engine"], ["engine-0", "engine-1"]),
        (["trainer", "engine-1"], ["engine-1", "trainer-0"]),
    ],
)
def test_parts_are_chosen_by_name_with_or_without_their_rank(logs, parts, expected):
    assert run_logs.chosen(logs, parts) == expected


def test_an_unknown_part_is_refused_with_the_nearest_name(logs):
    with pytest.raises(UserError, match=r"no log of 'proxi' in .*; did you mean 'proxy'"):
        run_logs.chosen(logs, ["proxi"])


def test_the_last_lines_of_each_log_are_shown(logs):
    assert list(run_logs.newest(logs, ["proxy", "engine-1"], 1)) == [("proxy", "proxy b"), ("engine-1", "engine-1 b")]


def test_later_lines_and_later_logs_are_followed_whole(logs, monkeypatch):
    monkeypatch.setattr(run_logs, "POLL_S", 0.0)
    steps = iter(
        [
            lambda: (logs / "proxy.log").open("a").write("half"),
            lambda: (logs / "proxy.log").open("a").write(" and rest\nx"),
            lambda: (logs / "rollout.log").write_text("first\n"),
        ]
    )

    def write_more() -> bool:
        step = next(steps, None)
        if step is not None:
            step()
        return step is None

    found = list(run_logs.follow(logs, lambda: run_logs.chosen(logs, []), write_more))
    assert found == [("proxy", "half and rest"), ("rollout", "first")]


def test_a_very_long_line_is_cut(logs):
    (logs / "proxy.log").write_text("x" * 10_000 + "\n")
    ((_, line),) = run_logs.newest(logs, ["proxy"], 1)
    assert len(line) == run_logs.LONGEST_LINE
