"""Results of tools that no call asked for."""

from __future__ import annotations

from agentrl.errors import RequestError


class Results:
    """A conversation's tool calls and their results, in order.

    Results before the first call are taken as they are: histories that were cut short may begin with them.
    """

    def __init__(self) -> None:
        self._called: set[str] = set()
        self._placed: list[tuple[str, str]] = []

    def call(self, call_id: str) -> None:
        """The assistant called a tool."""
        self._called.add(call_id)

    def result(self, call_id: str, at: str) -> None:
        """A tool answered a call; `at` is the place of the id."""
        if self._called:
            self._placed.append((call_id, at))

    def check(self) -> None:
        """Raises RequestError 400 for a result with an id that no call of the conversation has."""
        for call_id, at in self._placed:
            if call_id not in self._called:
                message = f"{at}: no tool call before it has the id {call_id!r}"
                raise RequestError(400, message, code="invalid_messages", param=at)
