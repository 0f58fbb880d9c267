"""Messages and recorded conversations that the tests of forks share."""

from __future__ import annotations

from agentrl.rendering.conversation import canonical
from agentrl.rendering.divergence import leading_system
from agentrl.store.calls.conversations import Conversation

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
LONG = "The user has two apples and wants more."


def says(role, content, **more):
    return {"role": role, "content": content, **more}


S, U1, A1, U2, A2, U3 = (
    says("system", "be brief"),
    says("user", "one"),
    says("assistant", LONG),
    says("user", "two"),
    says("assistant", "second"),
    says("user", "three"),
)
OTHER = says("system", "write a title")
U4 = says("user", "four")


def recorded(messages, tools=None, role="main", id="x", finish="stop"):
    n = leading_system(messages)
    system = [canonical(message) for message in messages[:n]]
    return Conversation(
        call_id=id, role=role, system=system, messages=messages[n:], tools=tools, options={}, finish=finish
    )


MAIN = [recorded([S, U1, A1], [ADD]), recorded([S, U1, A1, U2, A2], [ADD])]
WORKED = [
    recorded(
        [
            S,
            U1,
            says("assistant", None, tool_calls=[{"id": "c", "function": {"name": "add"}}]),
            says("tool", "2", tool_call_id="c"),
            A1,
        ],
        [ADD],
    )
]
OWN = "There are two books about apples."
