"""Talk to the agentrl proxy: open a session, run any agent against it, reward it, end it.

    with Client().session(task={"question": "2+2"}) as s:
        answer = my_agent(base_url=s.base_url, api_key=s.api_key)
        s.reward(1.0 if answer == "4" else 0.0)

A session that makes no call for long calls `s.heartbeat()` now and then. A sub-agent gets a session of its own,
`with s.child() as sub:`. Inside an agent, `Client(base_url, api_key)` with the agent's own two values opens them.

`Client` and `Session` block; `AsyncClient` and `AsyncSession` await. The blocking pair is generated from the awaiting
one (scripts/blocking_client.py). Connection errors, 502 and 503 are retried with the same idempotency key, because the
proxy may be killed and come back at any moment: nothing is lost and nothing counts twice. A 429 is waited out.
"""

from agentrl.client.awaiting import AsyncClient, AsyncSession
from agentrl.client.blocking import Client, Session
from agentrl.client.requests import LONGEST_ERROR, error_text

__all__ = ["LONGEST_ERROR", "AsyncClient", "AsyncSession", "Client", "Session", "error_text"]
