"""Makes the rows of one call of a generated run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.domain.schemas import Json
from agentrl.store.db import codec

from .episode_templates import TemplateCall

if TYPE_CHECKING:
    from .session_rows import Rows

ENGINES = [f"http://10.0.0.{number}:30000" for number in range(1, 5)]
REPLICAS = ("proxy-0", "proxy-1")
CALL_ERRORS = (
    "the engine did not answer within 120 s",
    "the engine closed the connection",
    "the prompt is longer than the model's context",
    "the engine refused the grammar",
)


def call_row(rows: Rows, session_id: str, call: TemplateCall, status: str, begin: float, end: float) -> Json:
    """The row of `interactions`, without a parent and a place in its session."""
    recorded, running = status in ("complete", "aborted"), status == "running"
    first, last = rows.timeline.version_at(begin), rows.timeline.version_at(end)
    replica = rows.rng.choice(REPLICAS)
    return {
        "id": rows.ids.at(begin),
        "run_id": rows.run_id,
        "session_id": session_id,
        "parent_id": None,
        "seq": None,
        "dialect": "openai.chat",
        "status": status,
        "role": call.role,
        "digest": rows.ids.digest(),
        "request_id": None,
        "repeat_key": None,
        "replica": replica,
        "delivery": "open" if running else "given",
        "holder": replica if running else None,
        "last_retry": None,
        "engine_url": rows.rng.choice(ENGINES) if recorded else None,
        "engine_backend": "sglang" if recorded else None,
        "engine_spans": None,
        "params": '{"temperature":1.0,"max_new_tokens":512}',
        "temperature": 1.0,
        "system_hash": call.system,
        "tools_hash": call.tools,
        "options": None,
        "messages": call.messages,
        "conversation_key": rows.ids.digest() if recorded else None,
        "textless_key": None,
        "fork_reason": call.fork_reason,
        "bridged": call.parent is not None,
        "distribution_modified": not call.trainable,
        "kv_mixed": False,
        "trainable": call.trainable,
        "prompt_tokens": call.prompt_tokens,
        "prompt_digest": call.prompt_digest,
        "output_tokens": call.output_tokens if recorded else 0,
        "upstream_tokens": 0,
        "cached_tokens": (call.prompt_tokens * 3) // 4 if recorded else None,
        "min_version": first if recorded else None,
        "max_version": last if recorded else None,
        "finish_reason": ("abort" if status == "aborted" else call.finish_reason) if recorded else None,
        "error": rows.rng.choice(CALL_ERRORS) if status == "failed" else None,
        "created_at": begin,
        "first_token_at": begin + 0.2 * (end - begin) if recorded else None,
        "finished_at": None if running else end,
    }


def spans(row: Json) -> list[list[int]]:
    """The versions that sampled a recorded call: the one at its begin, and the one at its end."""
    length, low, high = row["output_tokens"], row["min_version"], row["max_version"]
    if low == high:
        return [[low, 0, length]]
    return [[low, 0, length // 2], [high, length // 2, length]]


def data_row(row: Json, call: TemplateCall) -> Json:
    """The row of `interaction_data` of a recorded call."""
    return {"interaction_id": row["id"], "spans": codec.json_text(spans(row)), **call.data}
