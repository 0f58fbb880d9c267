"""An outside program: `group_program.py URL GROUP_SIZE SESSIONS NAME…` plays so many sessions of each group.

It opens one session of every group, in the order of the names, calls the model in each, then rewards and ends them in
the reverse order; and does so again until each group has its sessions of this program.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from agentrl.client import Client

url, size, rounds, *names = sys.argv[1:]
ask = {"messages": [{"role": "user", "content": "ab"}]}
with Client(url, "run-key", timeout_s=60) as client:
    for _ in range(int(rounds)):
        with ExitStack() as stack:
            opened = [
                stack.enter_context(client.session({"name": name}, group=name, group_size=int(size))) for name in names
            ]
            for s in opened:
                client.request("POST", f"/sessions/{s.id}/v1/chat/completions", ask, api_key=s.api_key)
            for s in reversed(opened):
                s.reward(float(s.sample_index % 2))
                s.end()
