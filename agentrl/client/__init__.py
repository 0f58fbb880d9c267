"""A client of the agentrl proxy: open a session, run any agent against it, reward it, end it.

    with Client().session(task={"question": "2+2"}) as s:
        answer = my_agent(base_url=s.base_url, api_key=s.api_key)
        s.reward(1.0 if answer == "4" else 0.0)

A session without calls for a long time must call `s.heartbeat()`. A sub-agent uses its own session: `with s.child() as
sub:`. Inside an agent, `Client(base_url, api_key)` with the agent's URL and key opens sub-agent sessions.

`Client` and `Session` are synchronous; `AsyncClient` and `AsyncSession` are asynchronous. The synchronous pair is
generated (scripts/blocking_client.py). Connection errors, 429, 502 and 503 are retried with the same idempotency key,
so a restart of the proxy loses no call and counts none twice.
"""

from agentrl.client.awaiting import AsyncClient, AsyncSession
from agentrl.client.blocking import Client, Session
from agentrl.client.requests import LONGEST_ERROR, error_text

__all__ = ["LONGEST_ERROR", "AsyncClient", "AsyncSession", "Client", "Session", "error_text"]
