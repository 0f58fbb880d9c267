"""The routes of the proxy that the trainer calls, and rollouts that write straight into the store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import numpy as np
from run_records import create_run
from support import VOCABULARY

from agentrl.domain.schemas import InteractionStatus, Json, SessionStatus, VersionSpan
from agentrl.domain.tokens import TokenIds
from agentrl.store import Database
from agentrl.store.calls import call_intents, call_outcomes
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts, session_limits
from agentrl.store.sessions.ends import sealing
from agentrl.store.training import memory_leases, rewards, version_states

ADMIN_KEY = "admin-key"


class PublishStub:
    """Answers as a proxy whose engines obey; `refuse` the first n requests to publish with 503.

    `turns` has every request about the engines' GPU memory, and each publish, in order.
    """

    def __init__(self, database: Database, run_id: str, *, refuse: int = 0) -> None:
        stub = self
        self.published: list[int] = []
        self.turns: list[str] = []
        self.requests, self.refuse = 0, refuse

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.headers["Authorization"] == f"Bearer {ADMIN_KEY}"
                stub.turns.append(self.path.rpartition("/")[2])
                if self.path == "/api/engines/release":
                    database.transact(memory_leases.grant, run_id, body["epoch"], body["lease_s"], "stub")
                    self.answer({})
                    return
                if self.path == "/api/engines/reload":
                    database.transact(memory_leases.end, run_id, body["epoch"], "stub")
                    self.answer({})
                    return
                if self.path != "/admin/publish":
                    self.send_error(404)
                    return
                stub.requests += 1
                if stub.requests <= stub.refuse:
                    self.send_error(503)
                    return
                with database.write() as conn:
                    assert memory_leases.hand_back(conn, run_id, body["epoch"], body["version"])
                    version_states.mark_published(conn, run_id, body["version"])
                    memory_leases.end(conn, run_id, body["epoch"], "stub")
                stub.published.append(body["version"])
                self.answer({"version": body["version"], "stall_s": {}})

            def answer(self, body: Json) -> None:
                raw = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def make_run(database: Database, *, steps: int) -> str:
    """A run called `test`."""
    with database.write() as conn:
        return create_run(conn, task_data=[{"n": i} for i in range(5)], steps=steps)


def play_groups(
    database: Database,
    run_id: str,
    count: int,
    *,
    seed: int = 0,
    version: int = 0,
    values: tuple[float, ...] = (0.0, 1.0, 2.0),
) -> None:
    """`count` groups of three two-turn sessions, rewarded with `values`."""
    limits = session_limits.Limits(
        group_size=3,
        min_group_size=2,
        max_concurrent_groups=100,
        max_staleness=10,
        groups_per_step=100,
        turn_discount=1.0,
        reward_timeout_s=0.0,
        end_grace_s=30.0,
        session_timeout_s=900.0,
        session_max_s=86400.0,
        heartbeat_timeout_s=60.0,
    )
    rng = np.random.default_rng(seed)
    for _ in range(count):
        prompt = rng.integers(3, VOCABULARY, 6).tolist()
        with database.write() as conn:
            new = group_starts.start_group(conn, run_id, limits, [codec.new_id() for _ in range(3)])
            for value, session_id in zip(values, new.session_ids, strict=True):
                first, ids = record_call(conn, run_id, session_id, None, [], prompt, _output(rng), rng, version=version)
                more = rng.integers(3, VOCABULARY, 2).tolist()
                record_call(conn, run_id, session_id, first, ids, more, _output(rng), rng, version=version)
                rewards.add(conn, session_id, value=value, discount=1.0)
                sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)


def _output(rng: np.random.Generator) -> list[int]:
    return rng.integers(3, VOCABULARY, 4).tolist()


def record_call(
    conn: Any,
    run_id: str,
    session_id: str,
    parent: str | None,
    before: list[int],
    delta: list[int],
    output: list[int],
    rng: np.random.Generator,
    *,
    version: int = 0,
    system: Json | None = None,
    said: Sequence[Json] = (),
    answer: Json | None = None,
) -> tuple[str, list[int]]:
    """A call whose prompt is `before` and `delta`, and whose new messages are `said`; returns its id and all ids up to
    its end.
    """
    call_id = codec.new_id()
    call_intents.begin(
        conn,
        call_intents.Intent(
            id=call_id,
            run_id=run_id,
            session_id=session_id,
            parent_id=parent,
            dialect="openai.chat",
            role="main",
            digest="d",
            replica="r",
            params={},
            temperature=1.0,
            system=None if system is None else codec.Content.of([system]),
            tools=None,
            fork_reason=None,
            bridged=bool(parent),
            distribution_modified=False,
            trainable=True,
            prompt_tokens=len(before) + len(delta),
            prompt_digest=TokenIds([*before, *delta]).digest,
            created_at=time.time(),
        ),
    )
    call_outcomes.finish(
        conn,
        call_id,
        session_id,
        call_outcomes.Outcome(
            status=InteractionStatus.COMPLETE,
            conversation_key=b"k",
            new_messages=list(said),
            answer=answer or {},
            prompt_delta_ids=list(delta),
            output_ids=output,
            logprobs=rng.normal(-4, 0.3, len(output)).tolist(),
            spans=[VersionSpan(version=version, start=0, end=len(output))],
            finish_reason="stop",
            engine_url="e",
            cached_tokens=0,
            first_token_at=None,
        ),
    )
    return call_id, [*before, *delta, *output]
