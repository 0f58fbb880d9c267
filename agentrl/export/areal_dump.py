"""AReaL's dump: one JSON line per sample, as text, under `{rollout|eval-rollout}/{version}/{task_id}.jsonl`.

A sample is a trajectory; of an evaluation session, each root-to-leaf path of its calls. Everything before its first
sampled token is the prompt, everything after it the completion, what tools answered included. `head_version` and
`tail_version` sampled its first and last token; the folder is the latter's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from sqlalchemy import Connection, select

from agentrl.domain.schemas import Int32, InteractionStatus
from agentrl.errors import UserError
from agentrl.export import row_pages
from agentrl.export.selection import Selection
from agentrl.store import Database
from agentrl.store.db import codec
from agentrl.store.tables import groups, interaction_data, interactions, sessions
from agentrl.store.training import returns
from agentrl.store.training import trajectories as paths

PAGE_SESSIONS = 64
Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the dump, and where it goes."""

    folder: str  # rollout or eval-rollout
    task_id: str
    sample_index: int
    ids: Int32  # (T,) the whole sequence
    prompt_len: int
    head_version: int
    tail_version: int
    reward: float

    def line(self, decode: Decode) -> bytes:
        """The JSON line."""
        ids = self.ids.tolist()
        return orjson.dumps(
            {
                "task_id": self.task_id,
                "sample_idx": self.sample_index,
                "seqlen": len(ids),
                "prompt_len": self.prompt_len,
                "head_version": self.head_version,
                "tail_version": self.tail_version,
                "reward": self.reward,
                "prompt": decode(ids[: self.prompt_len]),
                "completion": decode(ids[self.prompt_len :]),
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )


def tokenizer(folder: Path) -> Decode:
    """Text of token ids, special tokens included. Raises UserError when the folder has no tokenizer."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"--tokenizer: {folder} has no tokenizer.json; name the folder of the run's model")
    loaded = Tokenizer.from_file(str(file))
    return lambda ids: str(loaded.decode(ids, skip_special_tokens=False))


def write(folder: Path, samples: Sequence[Sample], decode: Decode) -> None:
    """Append samples to the dump in `folder`."""
    lines: dict[Path, list[bytes]] = {}
    for sample in samples:
        file = folder / sample.folder / str(sample.tail_version) / f"{sample.task_id}.jsonl"
        lines.setdefault(file, []).append(sample.line(decode))
    for file, of_file in lines.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as out:
            out.writelines(of_file)


def rollouts(database: Database, run_id: str, selection: Selection) -> Iterator[list[Sample]]:
    """The selected trajectories, in pages."""
    for page in row_pages.trajectory_pages(database, run_id, selection):
        samples = []
        for row, tokens in page:
            sampled = np.flatnonzero(tokens.turn_ids >= 0)
            if len(sampled):
                head, tail = tokens.versions[sampled[[0, -1]]].tolist()
                samples.append(
                    Sample(
                        "rollout",
                        row["task_id"] or row["group_id"],
                        row["sample_index"],
                        tokens.input_ids,
                        int(sampled[0]),
                        head,
                        tail,
                        tokens.episode_return,
                    )
                )
        yield samples


def evaluations(database: Database, run_id: str) -> Iterator[list[Sample]]:
    """Every path of every ended evaluation session, in pages."""
    after: str | None = ""
    while after is not None:
        page, after = database.query(_evaluations, run_id, after)
        yield page


def _evaluations(conn: Connection, run_id: str, after: str) -> tuple[list[Sample], str | None]:
    heads = conn.execute(
        select(sessions.c.id, sessions.c.sample_index, sessions.c.group_id, groups.c.task_id)
        .join(groups, groups.c.id == sessions.c.group_id)
        .where(sessions.c.run_id == run_id, sessions.c.is_eval.is_(True), sessions.c.id > after)
        .where(sessions.c.ended_at.is_not(None))
        .order_by(sessions.c.id)
        .limit(PAGE_SESSIONS)
    ).all()
    credited = returns.of_sessions(conn, [head.id for head in heads], 1.0)
    samples = [sample for head in heads for sample in _session(conn, head, credited[head.id].episode_return)]
    return samples, heads[-1].id if heads else None


def _session(conn: Connection, head: Any, reward: float) -> Iterator[Sample]:
    calls = {
        row.id: row
        for row in conn.execute(
            select(
                interactions.c.id,
                interactions.c.parent_id,
                interaction_data.c.prompt_delta_ids,
                interaction_data.c.output_ids,
                interaction_data.c.spans,
            )
            .join(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
            .where(interactions.c.session_id == head.id, interactions.c.status == InteractionStatus.COMPLETE)
            .order_by(interactions.c.seq)
        )
    }
    for path in paths.paths({row.id: row.parent_id for row in calls.values()}):
        turns = [calls[call_id] for call_id in path]
        spans: list[list[int]] = [span for turn in turns for span in turn.spans]
        if spans:
            pieces = [codec.unpack_ids(part) for turn in turns for part in (turn.prompt_delta_ids, turn.output_ids)]
            first = next(i for i, turn in enumerate(turns) if turn.spans)
            yield Sample(
                "eval-rollout",
                head.task_id or head.group_id,
                head.sample_index,
                np.concatenate(pieces),
                sum(len(piece) for piece in pieces[: 2 * first + 1]),
                spans[0][0],
                spans[-1][0],
                reward,
            )
