"""Makes the rows of one session of a generated run: its calls, their data, its rewards and its trajectories."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from agentrl.domain.evaluation import Label
from agentrl.domain.schemas import Json
from agentrl.store.db import codec

from .call_rows import call_row, data_row, spans
from .episode_templates import Template
from .episode_texts import first_prompt
from .run_timeline import Ids, Timeline

SESSION_ERRORS = (
    "TimeoutError: the episode took longer than 900 s",
    "KeyError: 'answer'",
    "openai.InternalServerError: Error code: 502",
    "ValueError: the tool's result is not JSON",
)
VERDICT = "judge disagreed"
SECOND_REWARD = 0.3
"""Share of the rewarded sessions with a reward for the format too."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What happens in one session. `cut` is the share of its calls' duration that it lives."""

    status: str
    template: Template
    begin: float
    end: float
    prompt: str
    cut: float = 1.0
    reward: float | None = None
    format_reward: bool = False
    rejected: bool = False  # by its agent
    label: Label | None = None  # of an evaluation
    temperature: float = 1.0


@dataclass(slots=True)
class Path:
    """A trajectory's row, and (spans, tokens) of the calls that it trains."""

    row: Json
    trained: list[tuple[list[list[int]], int]]


@dataclass(slots=True)
class Rows:
    """Rows by table, and what all of them share."""

    run_id: str
    ids: Ids
    timeline: Timeline
    rng: random.Random
    tables: dict[str, list[Json]] = field(default_factory=lambda: defaultdict(list))


def add(rows: Rows, group_id: str, index: int, episode: Episode) -> list[Path]:
    """Add a session with all its rows but those of its trajectories, which are returned."""
    session_id = rows.ids.at(episode.begin)
    calls = _calls(rows, session_id, episode)
    recorded = [row for row in calls if row is not None and row["seq"] is not None]
    now = rows.timeline.now
    is_open, is_closing = episode.status == "open", episode.status == "closing"
    ended_at = None if is_open else min(now, episode.begin + (episode.end - episode.begin) * min(1.0, episode.cut))
    last = max((row["finished_at"] for row in recorded), default=episode.begin)
    rows.tables["sessions"].append(
        {
            "id": session_id,
            "run_id": rows.run_id,
            "group_id": group_id,
            "sample_index": index,
            "key_hash": rows.ids.digest(),
            "status": episode.status,
            "seq": len(recorded),
            "is_eval": episode.label is not None,
            "is_baseline": False,
            "built": not (is_open or is_closing),
            "trajectories": None if is_open or is_closing or episode.label is not None else 0,
            "metadata": "{}" if episode.label is None else codec.json_text(episode.label.metadata),
            "error": rows.rng.choice(SESSION_ERRORS) if episode.status == "failed" else None,
            "answer": f"the answer is {rows.rng.randrange(1000)}" if episode.status == "completed" else None,
            "verdict": codec.json_text({"rejected": VERDICT, "trained": None}) if episode.rejected else None,
            "stats": codec.json_text({"turns": len(calls), "tool_errors": rows.rng.randrange(3)}),
            "parent_session_id": None,
            "root_session_id": None,
            "depth": 0,
            "name": None,
            "created_at": episode.begin,
            "last_seen_at": last,
            "due_at": (now + 20.0) if is_closing else last + 900.0,
            "ended_at": ended_at,
        }
    )
    if ended_at is not None:
        _rewards(rows, session_id, episode, ended_at)
    if episode.status != "completed" or episode.label is not None:
        return []
    rows.tables["sessions"][-1]["trajectories"] = len(episode.template.paths)
    return [_path(rows, group_id, session_id, episode, calls, path, ended_at) for path in episode.template.paths]


def _calls(rows: Rows, session_id: str, episode: Episode) -> list[Json | None]:
    """The row of each call of the template; None for those that the session does not reach."""
    length, now = episode.end - episode.begin, rows.timeline.now
    found: list[Json | None] = []
    seq = 0
    for call in episode.template.calls:
        begin, end = episode.begin + call.begin * length, episode.begin + call.end * length
        above = None if call.parent is None else found[call.parent]
        reached = call.begin < episode.cut and begin <= now
        if not reached or (call.parent is not None and (above is None or above["status"] != "complete")):
            found.append(None)
            continue
        status = call.status if call.end <= episode.cut and end <= now else "running"
        if status == "running" and episode.status != "open":
            status = "failed"
        seq += status in ("complete", "aborted")
        row = call_row(rows, session_id, call, status, begin, end)
        row |= {"parent_id": None if above is None else above["id"], "temperature": episode.temperature}
        row["seq"] = seq if status in ("complete", "aborted") else None
        row["trainable"] = call.trainable and episode.label is None
        found.append(row)
        rows.tables["interactions"].append(row)
        if row["seq"] is not None:
            data = data_row(row, call)
            if seq == 1:
                data["new_messages"] = first_prompt(episode.prompt)
            rows.tables["interaction_data"].append(data)
    return found


def _rewards(rows: Rows, session_id: str, episode: Episode, at: float) -> None:
    if episode.reward is None:
        return
    given = [("reward", episode.reward)] + ([("format", 0.1)] if episode.format_reward else [])
    for name, value in given:
        rows.tables["rewards"].append(
            {
                "id": rows.ids.at(at),
                "run_id": rows.run_id,
                "session_id": session_id,
                "interaction_id": None,
                "scope": "session",
                "name": name,
                "value": value,
                "source": "agent",
                "idempotency_key": None,
                "applied": True,
                "created_at": at,
            }
        )


def _path(
    rows: Rows,
    group_id: str,
    session_id: str,
    episode: Episode,
    calls: list[Any],
    path: list[tuple[int, bool]],
    at: float | None,
) -> Path:
    """A trajectory, ready or rejected, with its calls."""
    assert at is not None
    trajectory_id, leaf = rows.ids.at(at), calls[path[-1][0]]
    owned = [calls[i] for i, own in path if own]
    trained = [row for row in owned if row["trainable"] and row["role"] != "side"]
    reason = None
    if not trained:
        reason = "no_trainable_tokens"
    elif episode.rejected:
        reason = f"rejected: {VERDICT}"
    elif episode.reward is None:
        reason = "no_reward"
    rows.tables["trajectory_interactions"] += [
        {"trajectory_id": trajectory_id, "position": position, "interaction_id": calls[i]["id"], "owned": own}
        for position, (i, own) in enumerate(path)
    ]
    row = {
        "id": trajectory_id,
        "run_id": rows.run_id,
        "group_id": group_id,
        "session_id": session_id,
        "leaf_id": leaf["id"],
        "tokens": leaf["prompt_tokens"] + leaf["output_tokens"],
        "trainable_tokens": sum(call["output_tokens"] for call in trained),
        "min_version": min((call["min_version"] for call in trained), default=None),
        "max_version": max((call["max_version"] for call in trained), default=None),
        "return": (episode.reward or 0.0) + (0.1 if episode.format_reward and episode.reward is not None else 0.0),
        "state": "ready" if reason is None else "rejected",
        "reason": reason,
        "lease_epoch": None,
        "lease_step_id": None,
        "created_at": at,
    }
    rows.tables["trajectories"].append(row)
    return Path(row, [(spans(call), call["output_tokens"]) for call in trained])
