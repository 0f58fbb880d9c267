"""A dataset is read as the Parquet files that a hub keeps of it, at one commit; a wrong name gets the right ones."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.data.hub_files import find_split
from agentrl.errors import UserError

COMMIT = "c" * 40


def parquet(numbers: range) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"n": numbers}), out)
    return out.getvalue()


FILES = {
    "main/train/0000.parquet": parquet(range(3)),
    "main/train/0001.parquet": parquet(range(3, 5)),
    "main/test/0000.parquet": parquet(range(9, 10)),
}


class Hub(BaseHTTPRequestHandler):
    """The two routes of a hub that are used: a commit's files, and a file."""

    def do_GET(self) -> None:
        if self.path.startswith("/api/datasets/me/numbers/revision/refs%2Fconvert%2Fparquet"):
            siblings = [{"rfilename": name} for name in FILES]
            return self._send(json.dumps({"id": "me/numbers", "sha": COMMIT, "siblings": siblings}).encode(), {})
        prefix = f"/datasets/me/numbers/resolve/{COMMIT}/"
        body = FILES.get(self.path.removeprefix(prefix)) if self.path.startswith(prefix) else None
        if body is None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.send_header("X-Error-Code", "RepoNotFound")
            return self.end_headers()
        self._send(body, {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def _send(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


READ = """
import json, sys
from agentrl.configs.episodes.task_sources import TaskSource
from agentrl.data.task_stream import TaskStream
from agentrl.errors import UserError
for path in sys.argv[1:]:
    try:
        with TaskStream(TaskSource(path=path)) as stream:
            print(json.dumps([stream.content, stream.tasks(100)]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def test_a_split_is_read_at_one_commit_and_a_wrong_name_gets_the_right_ones(hub: str, tmp_path: Path) -> None:
    """In a process of its own, since the library reads its address when it is imported."""
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    names = ("me/numbers/main:train", "me/numbers:test", "me/numbers:tset", "me/numbers/other:train", "me/absent:x")
    command = [sys.executable, "-c", READ, *(f"hf://{name}" for name in names)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    train, test, misspelled, unknown, absent = map(json.loads, done.stdout.splitlines())
    assert train[0] == {"revision": COMMIT, "files": ["main/train/0000.parquet", "main/train/0001.parquet"]}
    assert train[1] == [{"n": n} for n in range(5)]
    assert test[1] == [{"n": 9}]
    assert misspelled == "tasks: me/numbers has no main:tset; did you mean 'main:test'?"
    assert unknown.startswith("tasks: me/numbers has no other:train")
    assert absent.startswith("tasks: the hub has no Parquet files of me/absent")
    assert "\n" not in absent


@pytest.mark.parametrize("spec", ["hf://numbers:train", "hf://me/numbers", "hf://me/numbers/a/b:train"])
def test_a_name_of_another_form_is_refused(spec: str) -> None:
    with pytest.raises(UserError, match=r"must look like hf://OWNER/NAME/CONFIG:SPLIT"):
        find_split(spec, "tasks")
