"""A proxy in a hundred lines: the HTTP API that rollouts use, over real sockets, with faults on request."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

Json = dict[str, Any]


def refusal(status: int, code: str, headers: dict[str, str] | None = None, message: str | None = None) -> JSONResponse:
    error = {"message": message or code, "type": code, "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers)


class StandIn:
    """Keeps what it was told. `faults` are answers to give, once each, before a path's own."""

    def __init__(self, groups: int = 2, size: int = 2) -> None:
        self.groups_left, self.size = groups, size
        self.sessions: dict[str, Json] = {}
        self.rewards: list[Json] = []
        self.seen_keys: Counter[str] = Counter()
        self.abandoned: list[str] = []
        self.heartbeat_timeout_s = 60.0
        self.history: list[tuple[str, Json, str]] = []  # (path, body, key) of every request that starts or beats
        self.faults: dict[str, list[JSONResponse]] = {}
        self.steps, self.published_step = 1, 0
        self.versions: dict[int, int] = {}  # published step → version, where it is another number
        self.faulty = False  # whether sessions that fail have no answered call
        self.status = "running"
        self.error: str | None = None
        self.most_failures: int | None = None  # as `rollout.max_failures_in_a_row`
        self.with_baseline = False  # groups have one more session, a greedy one
        self.claims: dict[str, str] = {}  # what evaluation groups are claimed as → by whom
        self.url = ""

    def _new_session(self, is_eval: bool, metadata: Json) -> Json:
        sid = f"{len(self.sessions):032x}"
        self.sessions[sid] = {"status": "open", "is_eval": is_eval, "metadata": metadata, "error": None}
        base_url = f"{self.url}/sessions/{sid}/v1"
        return {"session_id": sid, "api_key": f"key-{sid}", "base_url": base_url, "sample_index": 0}

    async def note(self, request: Request) -> Json:
        body: Json = await request.json() if await request.body() else {}
        self.history.append((request.url.path, body, request.headers["authorization"].removeprefix("Bearer ")))
        return body

    async def heartbeat(self, request: Request) -> JSONResponse:
        await self.note(request)
        return JSONResponse({"heartbeat_timeout_s": self.heartbeat_timeout_s})

    async def session_heartbeat(self, request: Request) -> JSONResponse:
        await self.note(request)
        return JSONResponse({"status": self.sessions[request.path_params["sid"]]["status"]})

    async def groups(self, request: Request) -> JSONResponse:
        body = await self.note(request)
        if self.status == "failed":
            return refusal(409, "run_failed", message=f"run r is failed: {self.error}")
        if body["is_eval"]:
            if self.claims.setdefault(body["claim"], body["owner"]) != body["owner"]:
                return refusal(409, "claimed")
            task, sessions = body["task"], [self._new_session(True, body["metadata"] | {"sampling": body["sampling"]})]
        elif self.groups_left == 0:
            self.published_step = self.steps
            return refusal(409, "run_finished")
        else:
            self.groups_left -= 1
            task = {"n": self.groups_left}
            sessions = [self._new_session(False, {}) for _ in range(self.size + self.with_baseline)]
            sessions = [s | {"is_baseline": i == self.size} for i, s in enumerate(sessions)]
        return JSONResponse(
            {"group_id": f"g{task.get('n')}", "task": {"id": "t", "data": task}, "sessions": sessions}, 201
        )

    async def abandon(self, request: Request) -> JSONResponse:
        self.abandoned.append((await request.json())["owner"])
        return JSONResponse({"abandoned": 0})

    async def new_session(self, request: Request) -> JSONResponse:
        opened = self._new_session(False, (await self.note(request)).get("metadata", {}))
        return JSONResponse(opened | {"group_id": "g"}, 201)

    async def reward(self, request: Request) -> JSONResponse:
        body = await request.json() | {"session_id": request.path_params["sid"]}
        self.seen_keys[body["idempotency_key"]] += 1
        if self.seen_keys[body["idempotency_key"]] == 1:
            self.rewards.append(body)
        return JSONResponse({"applied": True, "reward_id": "r"})

    async def end(self, request: Request) -> JSONResponse:
        self.sessions[request.path_params["sid"]] |= await request.json()
        failed = [s["error"] for s in self.sessions.values() if s["status"] == "failed"]
        if self.status == "running" and len(failed) >= (self.most_failures or len(self.sessions) + 1):
            self.status, self.error = "failed", f"{len(failed)} sessions in a row failed: {failed[-1]}"
        return JSONResponse({"status": "completed", "interactions": 0})

    async def delete(self, request: Request) -> JSONResponse:
        self.sessions[request.path_params["sid"]]["status"] = "abandoned"
        return JSONResponse({"status": "abandoned"})

    async def run(self, request: Request) -> JSONResponse:
        body = {"id": "run", "name": "r", "published_step": self.published_step, "steps": self.steps}
        body |= {"status": self.status, "error": self.error}
        body["current_version"] = self.version_of(self.published_step)
        return JSONResponse(body)

    def version_of(self, step: int) -> int:
        return self.versions.get(step, step)

    def publish(self, *steps: int, version: int | None = None) -> None:
        """These steps, one after another; their versions are numbered from `version`, else as they are."""
        for number, step in enumerate(steps):
            self.versions[step] = step if version is None else version + number
        self.published_step = steps[-1]

    def roll_back(self, step: int) -> None:
        """To a step, which is served again."""
        self.versions = {known: version for known, version in self.versions.items() if known <= step}
        self.published_step = step

    async def lineage(self, request: Request) -> JSONResponse:
        after = int(request.query_params["after"])
        steps = range(after + 1, self.published_step + 1)
        return JSONResponse(
            [{"step": step, "state": "published", "version_after": self.version_of(step)} for step in steps]
        )

    async def evaluations(self, request: Request) -> JSONResponse:
        rewards = {reward["session_id"]: reward["value"] for reward in self.rewards}
        rows = [
            {
                **s["metadata"],
                "status": s["status"],
                "session_id": sid,
                "reward": rewards.get(sid, 0.0),
                "fault": self.faulty and s["status"] == "failed",
            }
            for sid, s in self.sessions.items()
            if s["is_eval"]
            and s["status"] in ("completed", "failed", "abandoned")
            and s["metadata"]["evaluation"]["version"] == int(request.query_params["version"])
        ]
        return JSONResponse(rows)

    def app(self) -> Starlette:
        def faulty(path: str, endpoint: Any, method: str) -> Route:
            async def answer(request: Request) -> JSONResponse:
                waiting = self.faults.get(path)
                if waiting:
                    return waiting.pop(0)
                result: JSONResponse = await endpoint(request)
                return result

            return Route(path, answer, methods=[method])

        return Starlette(
            routes=[
                faulty("/groups", self.groups, "POST"),
                faulty("/groups/abandon", self.abandon, "POST"),
                faulty("/heartbeat", self.heartbeat, "POST"),
                faulty("/sessions/{sid}/heartbeat", self.session_heartbeat, "POST"),
                faulty("/sessions", self.new_session, "POST"),
                faulty("/sessions/{sid}/reward", self.reward, "POST"),
                faulty("/sessions/{sid}/end", self.end, "POST"),
                faulty("/sessions/{sid}", self.delete, "DELETE"),
                faulty("/api/run", self.run, "GET"),
                faulty("/api/runs/run/steps", self.lineage, "GET"),
                faulty("/api/runs/run/evaluations/episodes", self.evaluations, "GET"),
            ]
        )


@pytest.fixture
def proxy() -> Iterator[StandIn]:
    stand_in = StandIn()
    server = uvicorn.Server(uvicorn.Config(stand_in.app(), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    stand_in.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield stand_in
    server.should_exit = True
    thread.join()
