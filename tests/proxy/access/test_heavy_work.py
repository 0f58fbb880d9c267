"""Large requests never hold the event loop: who reads them, and that everything else goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from agentrl.errors import RequestError
from agentrl.proxy.access import heavy_work
from agentrl.proxy.access.heavy_work import INLINE_BYTES, Heavy
from agentrl.proxy.calls.prompts import prompt_lengths
from agentrl.proxy.dialects import MESSAGES
from agentrl.rendering.templates import chatml_renderer
from agentrl.testing import Reply

LARGE = INLINE_BYTES


def thread() -> str:
    return threading.current_thread().name


@pytest.fixture
def threads():
    found = Heavy(workers=2)
    yield found
    found.close()


async def test_large_work_leaves_the_loop_and_small_work_stays(threads):
    assert await threads.run("s", LARGE - 1, thread) == thread()
    assert (await threads.run("s", LARGE, thread)).startswith("heavy")
    with pytest.raises(ZeroDivisionError):
        await threads.run("s", LARGE, lambda: 1 / 0)
    await asyncio.sleep(0)
    assert (threads.size, threads._of) == (0, {})


async def test_the_loop_goes_on_while_large_work_is_done(threads):
    go_on = threading.Event()
    work = asyncio.create_task(threads.run("s", LARGE, go_on.wait, 20))
    advanced = 0
    for _ in range(100):
        await asyncio.sleep(0)
        advanced += 1
    assert (advanced, work.done()) == (100, False)
    go_on.set()
    assert await work


async def test_a_session_has_half_of_the_threads(threads):
    go_on = threading.Event()
    flood = [asyncio.create_task(threads.run("flood", LARGE, go_on.wait, 20)) for _ in range(20)]
    await asyncio.sleep(0)
    assert (await threads.run("other", LARGE, thread)).startswith("heavy")
    assert not any(task.done() for task in flood)
    go_on.set()
    assert all(await asyncio.gather(*flood))


async def test_waiting_work_is_bounded_in_bytes(threads, monkeypatch):
    monkeypatch.setattr(heavy_work, "MOST_BYTES", 4 * LARGE)
    monkeypatch.setattr(heavy_work, "MOST_BYTES_OF_ONE", 3 * LARGE)
    go_on = threading.Event()
    tasks = [asyncio.create_task(threads.run("one", LARGE, go_on.wait, 20)) for _ in range(3)]
    await asyncio.sleep(0)
    for session in ("one", "other"):
        with pytest.raises(RequestError) as refused:
            await threads.run(session, 2 * LARGE, thread)
        assert (refused.value.status, refused.value.retry_after_s) == (429, 1.0)
    tasks.append(asyncio.create_task(threads.run("other", LARGE, thread)))
    go_on.set()
    await asyncio.gather(*tasks)
    assert await threads.run("one", 2 * LARGE, thread)


async def test_work_that_was_given_up_is_not_begun_and_leaves_nothing(threads):
    go_on = threading.Event()
    begun: list[int] = []
    running = asyncio.create_task(threads.run("s", LARGE, go_on.wait, 20))
    waiting = asyncio.create_task(threads.run("s", LARGE, begun.append, 1))
    await asyncio.sleep(0)
    for task in (running, waiting):
        task.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    assert threads.size == LARGE  # a thread cannot be stopped
    go_on.set()
    while threads.size:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert (begun, threads._of) == ([], {})


def body(chars: int, **more) -> bytes:
    """A request whose bytes are six times its text: large, and yet short enough for the context to be looked at."""
    return json.dumps({"model": "default", "messages": [{"role": "user", "content": "é" * chars}], **more}).encode()


class Watched:
    """A function that notes which threads ran it, and that waits until it may go on."""

    def __init__(self, real):
        self.real, self.threads, self.begun, self.go_on = real, [], threading.Event(), threading.Event()

    def __call__(self, *args, **kwargs):
        self.threads.append(thread())
        self.begun.set()
        assert self.go_on.wait(120)
        return self.real(*args, **kwargs)


def send(proxy, session, path, raw):
    told = {"Authorization": f"Bearer {session['api_key']}", "content-type": "application/json"}
    return proxy.http.post(session["base_url"] + path, content=raw, headers=told)


def goes_on(proxy, watched, answer):
    """While a thread is at work, the proxy answers others."""
    assert watched.begun.wait(120)
    assert not answer.done()
    assert proxy.get("/health") == {"status": "ok"}
    other = proxy.session()
    small = b'{"messages": [{"role": "user", "content": "a"}]}'
    assert send(proxy, other, "/chat/completions", small).status_code == 200
    watched.go_on.set()
    assert watched.threads[0].startswith("heavy")


@pytest.mark.parametrize(
    ("path", "more"), [("/chat/completions", {}), ("/messages", {"max_tokens": 5}), ("/messages/count_tokens", {})]
)
def test_large_conversations_are_rendered_while_others_are_served(proxy, monkeypatch, path, more):
    session = proxy.session()
    real = chatml_renderer.ChatMLRenderer.render
    watched = Watched(real)
    large = lambda self, messages, tools: (  # noqa: E731
        watched(self, messages, tools) if len(messages[0]["content"]) > 1000 else real(self, messages, tools)
    )
    monkeypatch.setattr(chatml_renderer.ChatMLRenderer, "render", large)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(send, proxy, session, path, body(8000, **more))
        goes_on(proxy, watched, answer)
        assert answer.result().status_code == (200 if path.endswith("count_tokens") else 400)
    if not path.endswith("count_tokens"):
        assert "maximum context length is 2048 tokens" in answer.result().text


def test_large_bodies_are_decoded_while_others_are_served(proxy, monkeypatch):
    session = proxy.session()
    watched = Watched(type(MESSAGES).decode_count)
    monkeypatch.setattr(type(MESSAGES), "decode_count", lambda self, raw: watched(self, raw))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(send, proxy, session, "/messages/count_tokens", body(8000))
        goes_on(proxy, watched, answer)
        assert answer.result().json() == {
            "input_tokens": 16000 + len(proxy.renderer.render([{"role": "user", "content": ""}], None))
        }


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "a " * 100_000}]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "x" * 500}] * 100}),
        ("/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "x" * 50_000}]}),
        ("/messages/count_tokens", {"model": "default", "messages": [{"role": "user", "content": "x" * 50_000}]}),
        ("/responses", {"input": "x" * 50_000}),
        ("/completions", {"prompt": "x" * 50_000}),
        ("/completions", {"prompt": [5] * 5000}),
    ],
)
def test_a_request_longer_than_the_context_is_refused_before_rendering(proxy, monkeypatch, path, sent):
    session = proxy.session()

    def never(*_):
        raise AssertionError("it was rendered")

    monkeypatch.setattr(chatml_renderer.ChatMLRenderer, "render", never)
    monkeypatch.setattr(chatml_renderer.ChatMLRenderer, "encode", never)
    answer = send(proxy, session, path, json.dumps({"model": "default"} | sent).encode())
    assert answer.status_code == 400
    assert "maximum context length is 2048 tokens" in answer.text
    assert proxy.calls(session) == []


def test_lengths_of_large_conversations_are_counted_while_others_are_served(proxy, monkeypatch):
    session = proxy.session()
    real = prompt_lengths.check
    watched = Watched(real)
    large = lambda asked, renderer: (watched if asked.size >= LARGE else real)(asked, renderer)  # noqa: E731
    monkeypatch.setattr(prompt_lengths, "check", large)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(send, proxy, session, "/chat/completions", body(50_000))
        goes_on(proxy, watched, answer)
        assert "maximum context length is 2048 tokens" in answer.result().text


@pytest.mark.parametrize("text", ["abcdefgh", "ab cd ef gh", " abc \n defgh \u2003 ", "a b c d e f g h"])
def test_a_length_counted_in_pieces_is_that_of_the_whole_text(monkeypatch, text):
    monkeypatch.setattr(prompt_lengths, "PIECE", 3)
    fits, too_short = (SimpleNamespace(max_context=9, max_chars=most) for most in (8, 7))
    prompt_lengths._check_texts([text], fits, "prompt")
    with pytest.raises(RequestError, match="8 characters, of which 7 fit"):
        prompt_lengths._check_texts([text], too_short, "prompt")


class TestGate:
    @pytest.fixture
    def run_config(self, run_config):
        return run_config | {"proxy": {"max_concurrent_calls_per_session": 1, "max_calls_per_session": 2}}

    def test_counting_tokens_needs_a_place_and_uses_up_no_call(self, proxy, until):
        session = proxy.session()
        counting = lambda: send(proxy, session, "/messages/count_tokens", body(1)).status_code  # noqa: E731
        assert [counting() for _ in range(5)] == [200] * 5
        proxy.engine.enqueue(Reply(proxy.says("a"), hold_after=0))
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(send, proxy, session, "/chat/completions", body(1))
            until(lambda: proxy.engine.holding == 1)
            assert counting() == 429
            proxy.engine.release()
            assert answer.result().status_code == 200
        until(lambda: counting() == 200)
