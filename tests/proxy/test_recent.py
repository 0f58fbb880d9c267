"""What a replica remembers is bounded."""

from __future__ import annotations

import pytest

from agentrl.proxy import recent


def test_the_oldest_entry_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "REMEMBERED", 2)
    memory: recent.Recent[int] = recent.Recent()
    for number, key in enumerate("aba" + "c"):
        memory[key] = number
    assert memory == {"b": 1, "c": 3}
