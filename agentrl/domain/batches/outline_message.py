"""A batch's outlines as bytes: a header of JSON, then one array for each column of all outlines. No pickles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from agentrl.domain.batches.outline import BatchOutline, Outline

NAMES = ("trajectory_id", "session_id", "episode_id", "group_id")
"""Columns of text with one row for each trajectory."""
HEADER_BYTES = 8
_TEXT = "ascii"


def pack(batch: BatchOutline) -> bytes:
    """The message of a batch."""
    of = batch.trajectories
    columns: dict[str, NDArray[Any]] = {name: _texts([getattr(o, name) for o in of]) for name in NAMES} | {
        "calls": _texts([call for o in of for call in o.calls]),
        "prompts": _texts([prompt for o in of for prompt in o.prompts]),
        "counts": np.array([(len(o.calls), len(o.sampled), len(o.trained)) for o in of], np.int32).reshape(-1, 3),
        "outputs": _rows([o.outputs for o in of], 2),
        "sampled": _rows([o.sampled for o in of], 4),
        "trained": _rows([o.trained for o in of], 4),
        "temperatures": _flat([o.temperatures for o in of], np.float32),
        "kv_mixed": _flat([o.kv_mixed for o in of], np.bool_),
        "turn_returns": _flat([o.turn_returns for o in of], np.float64),
        "episode_return": np.array([o.episode_return for o in of], np.float64),
        "wasted": np.array([o.wasted_tokens for o in of], np.int64),
        "truncated": np.array([o.truncated for o in of], np.bool_),
    }
    header = orjson.dumps(
        {
            "batch": [batch.step_id, batch.step, batch.version, sorted(batch.ages.items()), sorted(batch.replayed)],
            "columns": [[name, array.dtype.str, array.shape] for name, array in columns.items()],
            "named": [list(one.named_returns.items()) for one in of],
            "greedy": [one.greedy_return for one in of],
        }
    )
    return b"".join([len(header).to_bytes(HEADER_BYTES), header, *(array.tobytes() for array in columns.values())])


def unpack(raw: bytes) -> BatchOutline:
    """Inverse of `pack`."""
    at = HEADER_BYTES + int.from_bytes(raw[:HEADER_BYTES])
    header = orjson.loads(raw[HEADER_BYTES:at])
    columns: dict[str, NDArray[Any]] = {}
    for name, kind, shape in header["columns"]:
        dtype = np.dtype(kind)
        count = int(np.prod(shape))
        columns[name] = np.frombuffer(raw, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    step_id, step, version, ages, replayed = header["batch"]
    return BatchOutline(
        step_id=step_id,
        step=step,
        version=version,
        trajectories=list(_outlines(columns, header["named"], header["greedy"])),
        ages=dict(ages),
        replayed=frozenset(replayed),
    )


def _outlines(
    columns: dict[str, NDArray[Any]], returns_by_name: list[list[Any]], greedy: list[float | None]
) -> Iterator[Outline]:
    named = [_read(columns[name]) for name in NAMES]
    calls, prompts = _read(columns["calls"]), _read(columns["prompts"])
    returns, wasted = columns["episode_return"].tolist(), columns["wasted"].tolist()
    truncated = columns["truncated"].tolist()
    m = s = k = 0
    for i, (of_calls, of_sampled, of_trained) in enumerate(columns["counts"].tolist()):
        turns = slice(m, m := m + of_calls)
        yield Outline(
            **dict(zip(NAMES, (names[i] for names in named), strict=True)),
            calls=tuple(calls[turns]),
            prompts=tuple(prompts[turns]),
            outputs=columns["outputs"][turns],
            temperatures=columns["temperatures"][turns],
            kv_mixed=columns["kv_mixed"][turns],
            sampled=columns["sampled"][s : (s := s + of_sampled)],
            trained=columns["trained"][k : (k := k + of_trained)],
            turn_returns=columns["turn_returns"][turns],
            episode_return=returns[i],
            named_returns={name: float(value) for name, value in returns_by_name[i]},
            wasted_tokens=wasted[i],
            truncated=truncated[i],
            greedy_return=None if (found := greedy[i]) is None else float(found),
        )


def _texts(values: Sequence[str]) -> NDArray[Any]:
    return np.array([value.encode(_TEXT) for value in values] or [b""], "S")[: len(values)]


def _read(column: NDArray[Any]) -> list[str]:
    return [value.decode(_TEXT) for value in column.tolist()]


def _rows(parts: Sequence[NDArray[Any]], width: int) -> NDArray[Any]:
    return np.concatenate([np.empty((0, width), np.int32), *parts], dtype=np.int32)


def _flat(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype)
