"""AReaL's dump: one JSON line per sample, as text, in `{rollout|eval-rollout}/{version}/{task_id}.jsonl`.

A sample is a trajectory, or a root-to-leaf path of an evaluation session's calls. The prompt ends before the first
sampled token; the completion is the rest, with the results of tools. `head_version` and `tail_version` are the versions
of the first and the last sampled token; the folder is named by `tail_version`. AReaL has neither `session_id` nor
`status`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import orjson

from agentrl.domain.schemas import SessionStatus
from agentrl.domain.selection import Selection
from agentrl.errors import UserError
from agentrl.store import Database
from agentrl.store.exports import row_pages
from agentrl.store.exports.sampled_paths import SampledPath

Decode = Callable[[list[int]], str]


def tokenizer(folder: Path, field: str = "--tokenizer") -> Decode:
    """A function that decodes token ids, special tokens included. Raises UserError without a tokenizer."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{field}: {folder} has no tokenizer.json; give the run's model folder")
    loaded = Tokenizer.from_file(str(file))
    return lambda ids: str(loaded.decode(ids, skip_special_tokens=False))


def write(folder: Path, paths: Sequence[SampledPath], decode: Decode) -> None:
    """Append paths to the dump in `folder`."""
    lines: dict[Path, list[bytes]] = {}
    for path in paths:
        file = folder / str(path.tail_version) / f"{path.task_id}.jsonl"
        lines.setdefault(file, []).append(line(path, decode))
    for file, of_file in lines.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as out:
            out.writelines(of_file)


def line(path: SampledPath, decode: Decode) -> bytes:
    """A sequence as a line of JSON."""
    ids = path.ids.tolist()
    return orjson.dumps(
        {
            "task_id": path.task_id,
            "sample_idx": path.sample_index,
            "seqlen": len(ids),
            "prompt_len": path.prompt_len,
            "head_version": path.head_version,
            "tail_version": path.tail_version,
            "reward": path.reward,
            "prompt": decode(ids[: path.prompt_len]),
            "completion": decode(ids[path.prompt_len :]),
            "session_id": path.session_id,
            "status": path.status,
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )


def rollouts(database: Database, run_id: str, selection: Selection) -> Iterator[list[SampledPath]]:
    """The selected trajectories, in pages."""
    for page in row_pages.trajectory_pages(database, run_id, selection):
        paths = []
        for row, tokens in page:
            sampled = np.flatnonzero(tokens.turn_ids >= 0)
            if len(sampled):
                head, tail = tokens.versions[sampled[[0, -1]]].tolist()
                paths.append(
                    SampledPath(
                        session_id=tokens.session_id,
                        status=SessionStatus.COMPLETED,
                        task_id=row["task_id"] or row["group_id"],
                        sample_index=row["sample_index"],
                        ids=tokens.input_ids,
                        prompt_len=int(sampled[0]),
                        head_version=head,
                        tail_version=tail,
                        reward=tokens.episode_return,
                    )
                )
        yield paths
