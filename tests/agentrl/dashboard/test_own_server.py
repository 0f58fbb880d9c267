"""`agentrl ui`: the printed link signs in and opens its page; Ctrl-C ends the server."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import uvicorn
from databases import Databases
from run_records import create_run
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.dashboard import own_server
from agentrl.errors import UserError
from agentrl.store import Database

CONFIG = {"name": "test", "model": "tiny", "agent": "a:B", "tasks": "t.jsonl", "steps": 9}
PAGE = "/ui/runs/test"


@pytest.fixture
def database_url(databases: Databases, tiny_model: Path) -> Iterator[str]:
    with databases.lent("sqlite") as url:
        database = Database(url)
        database.transact(lambda conn: create_run(conn, config=CONFIG, base_model=tiny_model, steps=9))
        database.close()
        yield url


def test_the_printed_link_signs_in_and_opens_its_page(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[uvicorn.Server] = []
    links: queue.Queue[str] = queue.Queue()

    class Kept(uvicorn.Server):
        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(own_server.uvicorn, "Server", Kept)
    database = Database(database_url)
    thread = threading.Thread(target=own_server.serve, args=(database, "127.0.0.1", 0, PAGE, links.put))
    thread.start()
    try:
        link = urlsplit(links.get(timeout=60))
        assert (link.path, parse_qs(link.query)) == ("/ui/sign-in", {"next": [PAGE]})
        with httpx.Client(base_url=f"http://{link.netloc}", timeout=60) as browser:
            assert browser.get("/").headers["location"] == "/ui/"
            assert browser.get(PAGE, headers={"accept": "text/html"}).status_code == 303
            refused = browser.post("/ui/sign-in", data={"key": "arl-ui-wrong"})
            assert refused.status_code in (401, 403)
            signed = browser.post("/ui/sign-in", data={"key": link.fragment, "next": PAGE})
            assert (signed.status_code, signed.headers["location"]) == (303, PAGE)
            assert "test" in browser.get(PAGE, headers={"accept": "text/html"}).raise_for_status().text
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(60)
        database.close()
    assert not thread.is_alive()


def test_a_port_that_is_taken_is_named(database_url: str) -> None:
    database = Database(database_url)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match=r"--port \d+: .*--port 0"):
        own_server.serve(database, "127.0.0.1", taken.getsockname()[1], PAGE, print)
    database.close()


def ui(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["ui", *arguments])


def test_the_command_opens_the_run_and_ends_with_ctrl_c(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, str]] = []

    def serve(_: Database, host: str, port: int, page: str, ready: Any) -> None:
        asked.append((host, port, page))
        ready("http://127.0.0.1:1/ui")
        raise KeyboardInterrupt

    monkeypatch.setattr(own_server, "serve", serve)
    done = ui("--database-url", database_url, "--port", "0")
    assert (done.exit_code, asked) == (130, [("127.0.0.1", 0, PAGE)])
    assert done.stdout.splitlines() == ["http://127.0.0.1:1/ui", "Ctrl-C stops"]


def test_an_unknown_session_is_refused_by_name(database_url: str) -> None:
    done = ui("--database-url", database_url, "--session", "none")
    assert isinstance(done.exception, UserError)
    assert "no session 'none'" in str(done.exception)
