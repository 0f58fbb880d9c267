"""Streams one answer: a POST to an engine, whose response is server-sent events.

POST ──► events ──► read ──► Chunk, Chunk, …, Chunk(finish_reason=…)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import aiohttp
import orjson

from agentrl.domain.schemas import Json
from agentrl.engine.chunks import Chunk
from agentrl.engine.control.control_requests import ControlRequests, failed, late, refusal
from agentrl.engine.event_buffer import EventBuffer
from agentrl.engine.wire import NotConnected, Wire
from agentrl.errors import EngineDied, EngineError

ROUTING_HEADER = "X-SMG-Routing-Key"
"""Requests with the same key get the same server from a router in front of several."""


class AnswerStreams(ControlRequests):
    """Sends requests to one server with its `key`, and streams answers over connections of its own. `http` belongs to
    the caller and may be shared; `close` ends the streams.
    """

    def __init__(
        self, url: str, http: aiohttp.ClientSession, *, key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        super().__init__(url, http, key=key)
        self._timeout_s = timeout_s
        self._wire = Wire(self.url, self._headers)

    async def _chunks(
        self,
        path: str,
        body: Json,
        read: Callable[[bytes], Chunk | None],
        *,
        rid: str,
        routing_key: str | None,
        timeout_s: float | None,
        refused: Callable[[str, int, bytes], EngineError] = refusal,
    ) -> AsyncGenerator[Chunk, None]:
        """Yield what `read` makes of each event, until a chunk has a finish reason.

        `refused` makes the error of a response with a status of 400 or more. Raises EngineUnavailable without a
        connection or after `timeout_s`, EngineDied when the connection breaks or the stream ends early.
        """
        where, seconds = f"{self.url}{path}", timeout_s or self._timeout_s
        headers = {} if routing_key is None else {ROUTING_HEADER: routing_key}
        events, response, ended = EventBuffer(), None, False
        try:
            response = await self._wire.post(path, orjson.dumps(body), headers, seconds)
            if response.status >= 400:
                raise refused(where, response.status, await response.rest())
            while data := await response.more():
                for event in events.feed(data):
                    chunk = read(event)
                    if chunk is None:
                        continue
                    ended = chunk.finish_reason is not None
                    yield chunk
                    if ended:
                        return
        except TimeoutError as error:
            raise late(where, seconds) from error
        except NotConnected as error:
            raise failed(where, error) from error
        except OSError as error:
            raise EngineDied(f"{where} failed: {error}") from error
        finally:
            if response is not None:
                self._wire.release(response, ending=ended)
        raise EngineDied(f"{self.url} ended the stream of {rid} before its finish reason")

    def hang_up(self) -> None:
        """Close all streams of a hanging server; they raise EngineUnavailable."""
        self._wire.hang_up()

    def close(self) -> None:
        """Close all streams and connections."""
        self._wire.close()
