"""What a run reports: the summary, the progress line, the curve, the transcripts."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.configs.config_files import parse_config
from agentrl.console import Console
from agentrl.domain.evaluation import Evaluation, Result
from agentrl.launch import packaged_runs
from agentrl.launch.views import curve, live_panel, summary
from agentrl.launch.views.snapshot import Snapshot, StepPoint

CONFIG = parse_config(
    {"name": "r", "model": "tiny", "agent": "a:A", "tasks": "a:t", "evaluation": {"tasks": "a:h", "size": 2}}
)


def point(step: int, **metrics: float) -> StepPoint:
    return StepPoint(
        step=step, reward=step / 10, staleness_max=step % 2, tokens_trained=100, trajectories=8, metrics=metrics
    )


def evaluation(step: int, **rewards: list[float]) -> Evaluation:
    """Of two tasks."""
    results = {name: Result({i: [r] for i, r in enumerate(of)}, 0, [step]) for name, of in rewards.items()}
    return Evaluation(step, step, 2 * len(rewards), results)


SNAPSHOT = Snapshot(
    status="running",
    target_steps=3,
    published_step=2,
    version=2,
    ready_groups=1,
    running_groups=2,
    newest_step_state="published",
    engines={"http://e": "serving"},
    tokens_per_s=10.0,
    points=[point(1, logprob_mismatch_mean_abs=1e-6, mismatch_tokens=300), point(2, mismatch_tokens=0)],
    evaluations=[
        evaluation(0, sampled=[0.0, 0.5], greedy=[0.5, 0.5]),
        evaluation(2, sampled=[0.5, 1.0], greedy=[1.0, 1.0]),
        replace(evaluation(3, sampled=[1.0]), episodes=4),
    ],
)


def test_the_summary_has_every_promised_figure() -> None:
    result = summary.summarize(SNAPSHOT, "sampled", 12.34, 1000)
    assert {
        "steps": 2,
        "wall_s": 12.3,
        "eval_before": 0.25,
        "eval_after": 0.75,
        "trajectories_trained": 16,
        "tokens_trained": 200,
        "max_staleness_seen": 1,
        "logprob_mismatch_mean_abs": pytest.approx(1e-6),
        "mismatch_tokens": 300,
        "rewards": [0.1, 0.2],
    }.items() <= result.items()
    assert [(e["step"], e["complete"]) for e in result["evaluations"]] == [(0, True), (2, True), (3, False)]
    sampled = result["evaluations"][1]["settings"]["sampled"]
    assert {"reward": 0.75, "perfect": 0.5, "tasks": 2, "failed": 0, "version_min": 2}.items() <= sampled.items()
    assert sampled["low"] < 0.75 < sampled["high"]
    assert result["gains"]["sampled"] == {"reward": 0.5, "low": 0.5, "high": 0.5}  # of each task


def test_a_run_without_evaluation_has_a_summary_too() -> None:
    result = summary.summarize(replace(SNAPSHOT, points=[], evaluations=[]), "sampled", 1, 0)
    assert (result["eval_before"], result["logprob_mismatch_mean_abs"], result["max_staleness_seen"]) == (None, None, 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"engines": {"http://e": "dead"}}, "an engine to serve"),
        ({"newest_step_state": "started"}, "the trainer's update"),
        ({"newest_step_state": "trained"}, "engines to load the new weights"),
        ({}, "rollouts: 1 of 8 groups ready, 2 running"),
        ({"published_step": 3}, "evaluation of step 3: 1 of 4 episodes"),
        (
            {"points": [], "ready_groups": 0, "running_groups": 0, "newest_step_state": None},
            "evaluation of step 0: 4 of 4 episodes",
        ),
        ({"published_step": 3, "evaluations": []}, "evaluation of step 3: its start"),
    ],
)
def test_progress_says_what_the_run_waits_for(changes: dict[str, object], text: str) -> None:
    assert live_panel.waiting_for(replace(SNAPSHOT, **changes), CONFIG).startswith(text)  # type: ignore[arg-type]


def test_sessions_that_all_fail_are_shown_at_once() -> None:
    out = io.StringIO()
    display = live_panel.Display(CONFIG, Console(file=out, width=300))
    healthy = replace(SNAPSHOT, engines={"http://e": "serving"}, published_step=0)
    for snapshot in (healthy, replace(healthy, failing="RuntimeError: no SDK" + "x" * 500), healthy):
        display.update(snapshot)
    lines = [
        line for line in out.getvalue().splitlines() if "the last sessions all failed: RuntimeError: no SDK" in line
    ]
    assert len(lines) == 1
    assert len(lines[0]) < 400


def test_without_a_terminal_each_step_leaves_a_line() -> None:
    out = io.StringIO()
    with live_panel.Display(CONFIG, Console(file=out)) as display:
        display.update(replace(SNAPSHOT, published_step=0, points=[]))
        display.update(SNAPSHOT)
        display.update(SNAPSHOT)
    assert out.getvalue().count("step 1/3  reward 0.100") == 1
    assert out.getvalue().count("step 2/3  reward 0.200") == 1
    assert "\x1b" not in out.getvalue()


def panel(*snapshots: Snapshot) -> str:
    """What a terminal shows after these snapshots, without its colours."""
    out = io.StringIO()
    with live_panel.Display(CONFIG, Console(file=out, width=100, force_terminal=True, color_system=None)) as display:
        display.starting("starting the engine " + "." * 200)
        for snapshot in snapshots:
            display.update(snapshot)
    return out.getvalue()


def test_a_terminal_shows_a_panel_below_the_lines_of_finished_steps() -> None:
    before, incomplete = replace(SNAPSHOT, published_step=0, points=[]), SNAPSHOT.evaluations[2]
    first = panel(before)
    assert "step 0/3" in first
    assert "reward –" in first
    assert "staleness –" in first
    assert "10 tokens/s" in first
    assert "waiting for rollouts: 1 of 8 groups ready, 2 running" in first
    assert f"evaluation of step {incomplete.step}" in first
    assert "evaluation of step 2" not in first
    later = panel(before, SNAPSHOT, replace(SNAPSHOT, points=[]))
    assert "step 1/3  reward 0.100" in later
    assert "step 2/3  reward 0.200" in later
    assert "staleness 0" in later[later.rindex("step 2/3") :]


def test_a_terminal_shows_what_the_first_start_waits_for_on_one_line() -> None:
    lines = [line for line in panel().splitlines() if "starting the engine" in line]
    assert lines
    assert all(line.count(".") < 100 for line in lines)


def test_a_complete_evaluation_leaves_a_line_with_its_intervals() -> None:
    out = io.StringIO()
    with live_panel.Display(CONFIG, Console(file=out)) as display:
        display.update(replace(SNAPSHOT, published_step=0, points=[], evaluations=SNAPSHOT.evaluations[:1]))
        display.update(SNAPSHOT)
        display.update(SNAPSHOT)
    (line,) = [line for line in out.getvalue().splitlines() if "evaluation of step" in line]
    assert "evaluation of step 2: greedy 1.000 [0.342, 1.000], sampled 0.750 [0.010, 0.999], version 2" in line


def test_the_final_table_compares_before_and_after_with_intervals() -> None:
    out = io.StringIO()
    result = summary.summarize(SNAPSHOT, "sampled", 1, 0)
    Console(file=out, width=200).print(packaged_runs.before_after(result))
    (row,) = [line for line in out.getvalue().splitlines() if "greedy" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:3] == ["greedy (2)", "0.500 [0.500, 0.500]", "1.000 [0.342, 1.000]"]
    assert cells[3:] == ["+0.500 [+0.500, +0.500]", "0%", "100%"]


def test_the_curve_is_a_picture_and_a_text(tmp_path: Path) -> None:
    rewards = [0.1, 0.5, 0.9]
    alone = Evaluation(0, 0, 1, {"sampled": Result({0: [0.5]})})  # one task has no interval
    evaluations = [alone.as_json(), *(e.as_json() for e in SNAPSHOT.evaluations[1:])]
    curve.save_png(tmp_path / "curve.png", "r", rewards, evaluations)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]
    assert "step" in curve.as_text(rewards)


def test_a_transcript_starts_at_the_question() -> None:
    tool_call = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": '{"expression": "1+2"}'}}
    calls = [
        {
            "new_messages": [{"role": "user", "content": "example"}, {"role": "user", "content": "1+2?"}],
            "answer": {"role": "assistant", "content": None, "tool_calls": [tool_call]},
        },
        {
            "new_messages": [{"role": "tool", "content": "3"}],
            "answer": {"role": "assistant", "content": "Answer: 3"},
        },
    ]
    lines = [line.strip() for line in packaged_runs.conversation(calls)]
    assert lines == ["user: '1+2?'", 'assistant: calc({"expression": "1+2"})', "tool: '3'", "assistant: 'Answer: 3'"]


def test_a_finished_demo_starts_anew_and_a_stopped_one_goes_on(tmp_path: Path) -> None:
    assert packaged_runs.free_name("demo", 0, tmp_path) == "demo"
    (tmp_path / "demo").mkdir()
    assert packaged_runs.free_name("demo", 0, tmp_path) == "demo"
    (tmp_path / "demo" / "summary.json").touch()
    assert packaged_runs.free_name("demo", 0, tmp_path) == "demo-2"
    assert packaged_runs.free_name("demo", 7, tmp_path) == "demo-seed7"


def test_the_commands_that_come_next_find_the_run_by_name_or_folder() -> None:
    assert packaged_runs.next_commands(CONFIG) == [
        "agentrl status --run r",
        "agentrl replay --run r --steps 1..",
        "agentrl export --run r --out data/",
    ]
    elsewhere = CONFIG.model_copy(update={"runs_dir": Path("/my runs")})
    assert packaged_runs.next_commands(elsewhere)[0] == "agentrl status --run '/my runs/r'"
