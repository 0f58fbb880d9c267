"""A scriptable server of another model, and calls to it through the proxy."""

import asyncio
import threading

import orjson
from aiohttp import web

from agentrl.engine.server_process import free_port
from agentrl.store.audit import run_audit

HELLO = [{"role": "user", "content": "abcd"}]
KEY = "sk-very-secret-key"
RUN_KEY = {"Authorization": "Bearer run-key"}


class Judge:
    """Another model's server: `answer` says what it does; keeps what it got."""

    def __init__(self):
        self.port = free_port()
        self.answer = whole({"id": "j1", "choices": [{"finish_reason": "stop", "message": {"content": "good"}}]})
        self.got = []
        self.gate = threading.Event()
        self.gone = threading.Event()
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(120)

    def _serve(self):
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", self.port).start())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _handle(self, request):
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.got.append((request.path, headers, await request.json()))
        try:
            return await self.answer(self, request)
        except asyncio.CancelledError:
            self.gone.set()
            raise

    async def opened(self):
        while not self.gate.is_set():  # noqa: ASYNC110  the test lives in another thread
            await asyncio.sleep(0.005)

    def stop(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)


def whole(body, status=200, headers=None):
    async def answer(judge, request):
        return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")

    return answer


def stream(*chunks, cut=False, wait_before=None):
    """Server-sent bytes as they are given; `cut` drops the connection, `wait_before` holds before that chunk."""

    async def answer(judge, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index, chunk in enumerate(chunks):
            if index == wait_before:
                await judge.opened()
            await response.write(chunk)
            await asyncio.sleep(0.002)
        if cut:
            request.transport.abort()
        return response

    return answer


def event(data, name=None):
    return (f"event: {name}\n" if name else "").encode() + b"data: " + orjson.dumps(data) + b"\n\n"


def chunk(content=None, finish_reason=None):
    delta = {} if content is None else {"role": "assistant", "content": content}
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return event({"id": "j1", "object": "chat.completion.chunk", "created": 0, "model": "gpt-x", "choices": [choice]})


STREAM = (chunk("go"), chunk("od"), chunk(None, "stop"), b"data: [DONE]\n\n")


def ask(proxy, session, model="judge", **options):
    return proxy.sdk(session).chat.completions.create(model=model, messages=HELLO, **options)


def upstream_calls(proxy, session):
    return [call for call in proxy.calls(session) if call["role"] == "upstream"]


def violations(proxy):
    with proxy.database.read() as conn:
        return list(run_audit.scan(conn, proxy.run_id))


def bearer(session):
    return {"Authorization": f"Bearer {session['api_key']}"}
