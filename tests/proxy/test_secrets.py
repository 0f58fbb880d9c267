"""No key is ever in clear in logs, answers, metrics or the database, and no prompt in the logs, at log level debug."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import zstandard
from databases import KINDS
from sqlalchemy import LargeBinary, make_url, select

from agentrl.engine.server_process import free_port
from agentrl.rendering import load_renderer
from agentrl.store import Database
from agentrl.store.tables import metadata
from agentrl.testing import FakeEngine, Reply

PROMPT = "xyzzy-the-prompt"
ADMIN_KEY = "arl-admin-" + "A" * 32
UPSTREAM_KEY = "sk-upstream-" + "U" * 32
WRONG = ["arl-run-" + "W" * 32, "wrong-" + "w" * 30, "arl-session-" + "Z" * 32]
MESSAGES = [{"role": "system", "content": PROMPT}, {"role": "user", "content": f"{PROMPT} please"}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 4},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 4},
    "/v1/messages": {"model": "default", "messages": MESSAGES[1:], "system": PROMPT, "max_tokens": 4},
}
ZSTD = b"\x28\xb5\x2f\xfd"


class Echo(BaseHTTPRequestHandler):
    """Another model's server, which repeats all that it gets: headers and body."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        said = orjson.dumps({"error": {"message": f"{self.headers} {body.decode()}"}})
        self.send_response(400 if b"fail" in body else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def echo() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()


@pytest.fixture
def run_config(run_config: dict[str, Any], echo: str) -> dict[str, Any]:
    upstream = {"base_url": echo, "api_key_env": "JUDGE_KEY"}
    return run_config | {"proxy": {"upstreams": {"judge": upstream}}}


class Run:
    """A proxy of its own process at log level debug; keeps every answer."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(timeout=120)
        self.answers: list[str] = []
        self.keys = {ADMIN_KEY, UPSTREAM_KEY, *WRONG}

    def ask(self, method: str, path: str, key: str, *, gives: bool = False, **options: Any) -> httpx.Response:
        """Ask; an answer that `gives` keys is no leak of them."""
        answer = self.http.request(method, self.url + path, headers={"Authorization": f"Bearer {key}"}, **options)
        if gives:
            self.keys |= set(re.findall(r"arl-(?:admin|run|session)-[\w-]{32}", answer.text))
        else:
            self.answers.append(f"{answer.headers} {answer.text}")
        return answer


@pytest.fixture
def started(store_url: str, fake_engine: FakeEngine, tmp_path: Path, until: Any) -> Iterator[tuple[Run, Path]]:
    port, log = free_port(), tmp_path / "log"
    env = os.environ | {
        "AGENTRL_DATABASE_URL": store_url,
        "AGENTRL_ADMIN_KEY": ADMIN_KEY,
        "JUDGE_KEY": UPSTREAM_KEY,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = ["proxy", "--run", "test", "--engine", fake_engine.url, "--port", str(port), "--log-level", "debug"]
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "agentrl", *command], env=env, stdout=out, stderr=out)
    run = Run(f"http://127.0.0.1:{port}")

    def serves() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return run.http.get(run.url + "/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(serves)
        yield run, log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        run.http.close()


def play(run: Run, engine: FakeEngine, says: list[int]) -> None:
    """Calls in every dialect that go well and that fail in every way, with right and wrong keys."""
    run_key = run.ask("POST", "/api/keys", ADMIN_KEY, gives=True, json={"power": "run", "name": "ci"}).json()["key"]
    run.ask("POST", "/api/keys", ADMIN_KEY, gives=True, json={"power": "admin", "name": "ops"})
    sessions = run.ask("POST", "/groups", run_key, gives=True, json={}).json()["sessions"]
    session, key = sessions[0]["session_id"], sessions[0]["api_key"]
    for path, body in BODIES.items():
        engine.enqueue(Reply(says))
        assert run.ask("POST", path, key, json=body).status_code == 200
        engine.enqueue(Reply(says))
        assert run.ask("POST", path, key, json=body | {"stream": True}).status_code == 200
        for wrong in WRONG:
            assert run.ask("POST", path, wrong, json=body).status_code == 401
        for failing in (
            Reply(status=400, error=f"bad {PROMPT}"),
            Reply(status=500, error=f"broken {PROMPT}"),
            Reply(error=f"too long {PROMPT}"),
            Reply(says, omit=frozenset({"output_ids"})),
        ):
            engine.enqueue(failing)
            assert run.ask("POST", path, key, json=body | {"stream": False}).status_code >= 400
        malformed = f'{{"messages": "{PROMPT}", "api_key": "{key}'
        assert run.ask("POST", path, key, content=malformed).status_code == 400
        assert run.ask("POST", path, key, json=body | {"nonsense": PROMPT}).status_code == 400
        assert run.ask("POST", path, key, json=body | {"model": "judge"}).status_code == 200
        assert run.ask("POST", path, key, json=body | {"model": "judge", "x": "fail"}).status_code == 400
        foreign = run.ask("POST", f"/sessions/{sessions[1]['session_id']}{path}", key, json=body)
        assert foreign.status_code == (400 if path == "/v1/responses" else 403)  # Codex repeats a 403
    run.ask("POST", f"/sessions/{session}/key", run_key, gives=True, json={"overlap_s": 60})
    run.ask("POST", "/api/keys/ci/rotate", ADMIN_KEY, gives=True, json={"overlap_s": 60})
    run.ask("POST", f"/sessions/{session}/reward", key, json={"value": 1.0, "nonsense": PROMPT})
    run.ask("POST", "/groups", run_key, content=b'{"owner": ')
    run.ask("POST", f"/sessions/{session}/end", key, json={})
    run.ask("POST", "/v1/chat/completions", key, json=BODIES["/v1/chat/completions"])
    run_id = run.ask("GET", "/api/run", run_key).json()["id"]
    for path in (
        "/metrics",
        "/api/keys",
        "/api/runs",
        f"/api/runs/{run_id}/events",
        f"/sessions/{session}/trace",
        f"/api/sessions/{session}",
        "/api/engines",
        "/openapi.json",
    ):
        assert run.ask("GET", path, ADMIN_KEY).status_code == 200, path
    run.ask("DELETE", "/api/keys/ops", ADMIN_KEY)


def cells(database: Database) -> Iterator[tuple[str, bytes]]:
    """Every cell of every table, unpacked."""
    with database.read() as conn:
        for table in metadata.tables.values():
            for row in conn.execute(select(table)):
                for column, value in zip(table.columns, row, strict=True):
                    if isinstance(column.type, LargeBinary) and value and bytes(value).startswith(ZSTD):
                        value = zstandard.ZstdDecompressor().decompressobj().decompress(bytes(value))
                    yield f"{table.name}.{column.name}", value if isinstance(value, bytes) else str(value).encode()


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("database_kind", KINDS)
def test_no_key_is_in_clear_anywhere_and_no_prompt_in_the_logs(
    started: tuple[Run, Path], store_url: str, fake_engine: FakeEngine, tiny_model: Path
) -> None:
    run, log = started
    play(run, fake_engine, load_renderer(tiny_model).render([{"role": "user", "content": "ok"}], None)[:4])
    assert len(run.keys) >= 10
    keys = [key.encode() for key in run.keys]
    logged = log.read_bytes()
    assert logged.count(b"\n") > 3, "the log level debug says something"
    assert PROMPT.encode() not in logged, [line for line in logged.splitlines() if PROMPT.encode() in line]
    for key in keys:
        assert key not in logged
        for answer in run.answers:
            assert key not in answer.encode()
    database = Database(store_url)
    found = list(cells(database))
    database.close()
    assert any(PROMPT.encode() in value for _, value in found), "what is recorded can be read"
    for where, value in found:
        assert not any(key in value for key in keys), where
    if store_url.startswith("sqlite"):
        file = str(make_url(store_url).database)
        for suffix in ("", "-wal"):
            raw = Path(file + suffix).read_bytes() if Path(file + suffix).exists() else b""
            assert not any(key in raw for key in keys)
