"""Reads the tokens of paths of calls: ids, logprobs and experts. They never change once a session has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sqlalchemy import Connection, select
from zstandard import ZstdError

from agentrl.domain.batches.outline import PathTokens
from agentrl.store.calls import call_routing
from agentrl.store.db import codec
from agentrl.store.db.id_lists import parts
from agentrl.store.tables import interaction_data

CHUNK_TOKENS = 1 << 20
"""Tokens of the trajectories that one transaction reads: 8 MB of ids and logprobs."""
DAMAGED = (LookupError, ValueError, ZstdError)
"""What `read` raises for a call without data, for data that do not belong together, and for damaged ones."""


def chunks(lengths: Mapping[str, int], most: int = CHUNK_TOKENS) -> Iterator[list[str]]:
    """Trajectories, given with their lengths, in chunks of at most `most` tokens; a longer one is a chunk by itself."""
    chunk: list[str] = []
    tokens = 0
    for trajectory_id, length in lengths.items():
        if chunk and tokens + length > most:
            yield chunk
            chunk, tokens = [], 0
        chunk.append(trajectory_id)
        tokens += length
    if chunk:
        yield chunk


def read(conn: Connection, paths: Mapping[str, Sequence[str]], *, routing: bool = True) -> dict[str, PathTokens]:
    """The tokens of trajectories, given with the calls of their paths. `routing` reads the recorded experts too.

    Raises `DAMAGED`.
    """
    wanted = list({call: None for path in paths.values() for call in path})
    data: dict[str, Any] = {}
    for ids in parts(wanted):
        c = interaction_data.c
        rows = conn.execute(
            select(c.interaction_id, c.prompt_delta_ids, c.output_ids, c.logprobs).where(c.interaction_id.in_(ids))
        )
        data |= {row.interaction_id: row for row in rows}
    found = {name: of_calls([data[call] for call in path]) for name, path in paths.items()}
    if routing:
        lengths = {name: len(tokens.input_ids) for name, tokens in found.items()}
        for name, experts in call_routing.of_trajectories(conn, lengths).items():
            found[name] = replace(found[name], routed=experts)
    return found


def of_calls(calls: Sequence[Any]) -> PathTokens:
    """The tokens of a path, from the rows of its calls. Raises ValueError for a call without a logprob per token."""
    ids, logprobs, outputs, at = [], [], [], 0
    for call in calls:
        delta, output = codec.unpack_ids(call.prompt_delta_ids), codec.unpack_ids(call.output_ids)
        sampled = codec.unpack_logprobs(call.logprobs)
        if len(sampled) != len(output):
            raise ValueError(f"call {call.interaction_id}: {len(sampled)} logprobs for {len(output)} tokens")
        ids += [delta, output]
        logprobs += [np.zeros(len(delta), np.float32), sampled]
        outputs.append((at + len(delta), at := at + len(delta) + len(output)))
    return PathTokens(np.concatenate(ids), np.concatenate(logprobs), np.array(outputs, np.int32))
