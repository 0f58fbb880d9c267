"""Bodies of the routes: bounded, checked, and refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.engine.control.preparation import DIGESTS, MOST_SOURCES, PREPARE, PREPARED, SWAP
from agentrl.engine.prepared.prepared_routes import answer
from agentrl.engine.prepared.preparer import Preparer

from .test_preparer import Script, order

VALID: dict[str, Any] = order(3).model_dump(mode="json")


@pytest.fixture
def preparer() -> Preparer:
    script = Script()
    return Preparer(script.fetch, script)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "../v3-a"}, "not the folder of version 3"),
        ({"name": "v4-a"}, "not the folder of version 3"),
        ({"name": "v3-" + "a" * 300}, "at most"),
        ({"version": -1}, "greater than or equal to 0"),
        ({"version": 1 << 40}, "less than"),
        ({"version": "3x"}, "integer"),
        ({"checksum": "0" * 63}, "match"),
        ({"sources": []}, "at least 1"),
        ({"sources": [{"kind": "folder", "root": "/w"}] * (MOST_SOURCES + 1)}, "at most"),
        ({"sources": [{"kind": "tape"}]}, "tape"),
        ({"sources": [{"kind": "folder", "root": "/w", "more": 1}]}, "Extra"),
        ({"sources": [{"kind": "http", "url": "http://h"}]}, "token"),
        ({"sources": "x"}, "list"),
        ({"more": 1}, "Extra"),
    ],
    ids=range(14),
)
async def test_an_invalid_order_is_refused(preparer: Preparer, change: dict[str, Any], says: str) -> None:
    found = await answer(preparer, "POST", PREPARE, json.dumps(VALID | change).encode())
    assert (found.status, found.body["success"]) == (400, False)
    assert says in found.body["message"]
    assert len(found.body["message"]) <= 600
    assert preparer.preparation().name is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'"v3"', b"[" * 100_000], ids=range(7))
@pytest.mark.parametrize("path", [PREPARE, SWAP])
async def test_garbage_is_refused(preparer: Preparer, path: str, body: bytes) -> None:
    assert (await answer(preparer, "POST", path, body)).status == 400


async def test_a_method_that_a_route_has_not_is_refused(preparer: Preparer) -> None:
    for method, path in [("GET", PREPARE), ("POST", PREPARED), ("DELETE", SWAP), ("PUT", DIGESTS)]:
        assert (await answer(preparer, method, path, b"")).status == 405


async def test_a_swap_of_a_version_that_is_not_ready_is_a_conflict(preparer: Preparer) -> None:
    body = json.dumps({"name": "v3-a", "version": 3}).encode()
    found = await answer(preparer, "POST", SWAP, body)
    assert found.status == 409
    assert "not ready" in found.body["message"]
    assert (await answer(preparer, "GET", DIGESTS, b"")).status == 409
