"""AReaL's dump: one JSON line per sample, as text, in `{rollout|eval-rollout}/{version}/{task_id}.jsonl`.

A sample is a trajectory, or a root-to-leaf path of an evaluation session's calls. The prompt ends before the first
sampled token; the completion is the rest, with the results of tools. `head_version` and `tail_version` are the versions
of the first and the last sampled token; the folder is named by `tail_version`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from agentrl.domain.schemas import Int32
from agentrl.domain.selection import Selection
from agentrl.errors import UserError
from agentrl.store import Database
from agentrl.store.exports import evaluation_paths, row_pages

PAGE_SESSIONS = 64
Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the dump and its destination."""

    folder: str  # rollout or eval-rollout
    task_id: str
    sample_index: int
    ids: Int32  # (T,) the whole sequence
    prompt_len: int
    head_version: int
    tail_version: int
    reward: float

    def line(self, decode: Decode) -> bytes:
        """Format the JSON line."""
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
    """A function that decodes token ids, special tokens included. Raises UserError without a tokenizer."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"--tokenizer: {folder} has no tokenizer.json; give the run's model folder")
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
    """All paths of all ended evaluation sessions, in pages."""
    for page in evaluation_paths.pages(database, run_id):
        yield [
            Sample(
                "eval-rollout",
                path.task_id,
                path.sample_index,
                path.ids,
                path.prompt_len,
                path.head_version,
                path.tail_version,
                path.reward,
            )
            for path in page
        ]
