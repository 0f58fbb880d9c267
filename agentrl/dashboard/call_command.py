"""A recorded call as a request: its body, and a `curl` command that sends it again."""

from __future__ import annotations

import shlex
from typing import Any

import orjson

from agentrl.dashboard.page_rendering import LONGEST_TEXT
from agentrl.diagnosis.record import Call
from agentrl.domain.schemas import Json


def body(call: Call) -> Json:
    """The request in Chat Completions' shape: the conversation, the tools, and the parameters that were used."""
    sent: dict[str, Any] = {"model": "default", "messages": call.asked}
    if call.tools:
        sent["tools"] = call.tools
    return sent | {name: value for name, value in sorted(call.used.items()) if value is not None}


def curl(call: Call) -> str:
    """A command that sends the request to a proxy; the address and the key come from the environment.

    A page would cut a command that is too long, so such a request has none.
    """
    sent = shlex.quote(orjson.dumps(body(call), default=str).decode())
    head = '-H "authorization: Bearer $OPENAI_API_KEY" -H "content-type: application/json"'
    command = f'curl -s "$OPENAI_BASE_URL/chat/completions" {head} -d {sent}'
    return command if len(command) <= LONGEST_TEXT else "# the request is too long to be shown as a command"
