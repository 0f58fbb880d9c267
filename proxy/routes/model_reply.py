"""The response to a model call: the answers of an exchange, streamed or whole.

Exchange ─ events ─► Reply ─► dialect.stream: every event, at once   ─► client
                           └► dialect.encode: all answers, at the end ─► client
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentrl.errors import RequestError
from agentrl.proxy.calls.exchanges import ClientLeft, Event, Exchange
from agentrl.proxy.dialects.dialect import Dialect, StreamEncoder
from agentrl.proxy.dialects.model_answer import Answer
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.proxy.routes.client_disconnect import disconnected


class Reply(Response):
    """The answers of an exchange in a dialect, streamed as they are sampled, or whole.

    A stream begins with the first event, so that an early failure still has its own status.
    """

    def __init__(
        self,
        dialect: Dialect,
        asked: ModelRequest,
        exchange: Exchange,
        after: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._dialect = dialect
        self._asked = asked
        self._exchange = exchange
        self._after = after  # runs once the client has received the end
        self.status_code = 200
        self.streamed = asked.stream
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answers. Raises RequestError when they fail before anything is sent."""
        exchange = self._exchange
        left = asyncio.create_task(disconnected(receive))
        left.add_done_callback(lambda _: exchange.wake())
        exchange.join()
        ended = False
        try:
            ended = await (self._stream(left, send) if self._asked.stream else self._whole(left, send))
        except ClientLeft:
            pass
        finally:
            left.cancel()
            if ended:
                exchange.mark_delivered()
            else:
                exchange.leave()
        if ended and self._after is not None:
            await self._after()

    async def _whole(self, left: asyncio.Task[None], send: Send) -> bool:
        found: dict[int, Answer] = {}
        while len(found) < self._asked.choices:
            found |= _answers(await self._exchange.after(len(found), left))
        body = self._dialect.encode(self._asked, self._exchange.header, [found[index] for index in sorted(found)])
        await _still_there(left)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return True

    async def _stream(self, left: asyncio.Task[None], send: Send) -> bool:
        """Send the stream; returns whether it was complete."""
        news = await self._exchange.after(0, left)
        encoder = self._dialect.stream(self._asked, self._exchange.header)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        found: dict[int, Answer] = {}
        out, seen, whole = encoder.start(), 0, True
        try:
            while news:
                seen += len(news)
                found |= _answers(news)
                if out := out + _encoded(encoder, news):
                    await send({"type": "http.response.body", "body": out, "more_body": True})
                    out = b""
                news = await self._exchange.after(seen, left)
            last = encoder.end([found[index] for index in sorted(found)])
        except RequestError as error:
            last, whole = encoder.error(error), False
        await _still_there(left)
        await send({"type": "http.response.body", "body": last})
        return whole


async def _still_there(left: asyncio.Task[None]) -> None:
    """Raises ClientLeft when the client has disconnected: the end of the answer then counts as not delivered."""
    await asyncio.sleep(0)  # lets the disconnect be noticed
    if left.done():
        raise ClientLeft


def _answers(news: list[Event]) -> dict[int, Answer]:
    """The answers among some events, by choice."""
    return {choice: event for choice, event in news if isinstance(event, Answer)}


def _encoded(encoder: StreamEncoder, news: list[Event]) -> bytes:
    """Some events as the dialect streams them."""
    return b"".join(
        encoder.finish(choice, event) if isinstance(event, Answer) else encoder.push(choice, event)
        for choice, event in news
    )
