"""What a replica remembers is bounded."""

from __future__ import annotations

import pytest

from agentrl.proxy import state


def test_the_oldest_entry_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "REMEMBERED", 2)
    recent: state.Recent[int] = state.Recent()
    for number, key in enumerate("aba" + "c"):
        recent[key] = number
    assert recent == {"b": 1, "c": 3}
