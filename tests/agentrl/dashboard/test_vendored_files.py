"""The files of other projects that pages load are the published ones."""

from __future__ import annotations

import hashlib
from importlib.resources import files


def test_a_vendored_file_has_its_recorded_digest() -> None:
    folder = files("agentrl.dashboard") / "static" / "vendor"
    lines = [line.split() for line in (folder / "uplot.sha256").read_text().splitlines()]
    recorded = {name: digest for digest, name in lines}
    found = {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in folder.iterdir()}
    del found["uplot.sha256"]
    assert found == recorded
