"""The data of the token view (`tokens.js`): the text of each id, and the arrays of each trajectory."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.diagnosis.report import Decode
from agentrl.domain.schemas import FACTS, Json
from agentrl.store.db.likeliest_codec import NO_TOKEN
from agentrl.visible import visible

ARRAYS = ("input_ids", "turn_ids", "logprobs", "versions", "ages", *FACTS)


def of(trajectories: Iterable[Json], decode: Decode | None) -> Json:
    """The data. `trajectories` are rows of `columns.TOKENS`; without `decode`, ids stand for their text."""
    used: set[int] = set()
    paths = []
    for row in trajectories:
        used.update(row["input_ids"].tolist())
        likeliest = row["top_logprobs"] or []
        used.update(token for call in likeliest for token in call["ids"].ravel().tolist() if token != NO_TOKEN)
        about = {name: row[name] for name in ("trajectory_id", "state", "reason", "step")}
        spans = {"reasons": row["loss_reasons"], "likeliest": likeliest}
        paths.append(about | spans | {"arrays": {name: _packed(row[name]) for name in ARRAYS}})
    texts = {str(one): visible(decode([one]), "\n") if decode else f"‹{one}› " for one in sorted(used)}
    return {"facts": FACTS, "texts": texts, "paths": paths}


def _packed(values: NDArray[Any]) -> Json:
    """An array as base64: half of the bytes of JSON, and no parser has to read its numbers."""
    kind = np.float32 if values.dtype.kind == "f" else np.int32
    raw = values.astype(np.dtype(kind).newbyteorder("<")).tobytes()
    return {"type": kind.__name__, "base64": base64.b64encode(raw).decode()}
