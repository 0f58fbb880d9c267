"""Serves a reward model over HTTP: `agentrl scorer`.

    POST /score {"conversations": [{"messages": […], "tools"?: […]}, …]}  ──►  {"rewards": [r, …]}
    GET /health                                                           ──►  {"model": FOLDER}

    requests ──► queue ──► one thread computes, up to BATCH_TOKENS padded tokens at a time ──► answers

With a key, each request to /score needs `Authorization: Bearer KEY`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.trainer.tuning.reward_scoring import RewardScorer

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 16 * 2**20
MAX_CONVERSATIONS = 256
MAX_WAITING = 4096
"""Sequences that wait; more are answered with 503."""
BATCH_TOKENS = 16_384
Waiting = tuple[list[int], "asyncio.Future[float]"]


class RewardServer:
    """The application and its queue."""

    def __init__(self, scorer: RewardScorer, name: str, key: str | None = None) -> None:
        self._scorer, self._name, self._key = scorer, name, key
        self._waiting: list[Waiting] = []
        self._computed: list[Waiting] = []
        self._failed = False  # whether the computation has ended
        self._arrived = asyncio.Event()

    def app(self) -> Starlette:
        """The application for a server."""
        return Starlette(
            routes=[Route("/score", self._score, methods=["POST"]), Route("/health", self._health)],
            lifespan=self._computing,
        )

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({"model": self._name})

    async def _score(self, request: Request) -> JSONResponse:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode()):
            return _refusal(401, "the key is missing or wrong")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return _refusal(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        try:
            sequences = [
                self._scorer.encode(one["messages"], one.get("tools")) for one in _conversations(json.loads(body))
            ]
        except UserError as error:
            return _refusal(422, str(error))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return _refusal(422, f"not a request for scores: {error!r}")
        if self._failed:
            return _refusal(503, "the computation of rewards failed")
        if len(self._waiting) + len(sequences) > MAX_WAITING:
            return _refusal(503, "too many conversations wait")
        loop = asyncio.get_running_loop()
        mine: list[Waiting] = [(ids, loop.create_future()) for ids in sequences]
        self._waiting += mine
        self._arrived.set()
        return JSONResponse({"rewards": [await reward for _, reward in mine]})

    @asynccontextmanager
    async def _computing(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._compute())
        task.add_done_callback(self._ended)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        """If the computation has failed, answer all with an error and end the server. Its parent restarts it."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._failed = True
        log.critical("the computation of rewards failed, so the server ends", exc_info=error)
        for _, future in (*self._computed, *self._waiting):
            if not future.done():
                future.set_exception(RuntimeError("the computation of rewards failed"))
        signal.raise_signal(signal.SIGTERM)

    async def _compute(self) -> None:
        """Compute the rewards of what waits, in batches."""
        while True:
            await self._arrived.wait()
            self._computed = batch = self._next_batch()
            if not batch:
                self._arrived.clear()
                continue
            try:
                rewards = await asyncio.to_thread(self._scorer.rewards, [ids for ids, _ in batch])
            except RuntimeError as error:  # of torch, for example out of memory: these requests fail, others go on
                for future in [future for _, future in batch if not future.done()]:
                    future.set_exception(RuntimeError(str(error)[:300]))
            else:
                for (_, future), reward in zip(batch, rewards, strict=True):
                    if not future.done():
                        future.set_result(reward)

    def _next_batch(self) -> list[Waiting]:
        """Take the oldest sequences that fit together; at least one."""
        batch: list[Waiting] = []
        longest = 0
        while self._waiting:
            ids, future = self._waiting[0]
            longest = max(longest, len(ids))
            if batch and longest * (len(batch) + 1) > BATCH_TOKENS:
                break
            self._waiting.pop(0)
            if not future.done():
                batch.append((ids, future))
        return batch


def _conversations(body: Json) -> list[Json]:
    """The conversations of a request. Raises UserError."""
    found = body["conversations"]
    if not isinstance(found, list) or not 0 < len(found) <= MAX_CONVERSATIONS:
        raise UserError(f"conversations: a list of 1 to {MAX_CONVERSATIONS}")
    return found


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status)
