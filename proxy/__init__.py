"""The recording proxy.

serving/    processes, sockets, connections
api_docs/   /openapi.json and /docs
routes/     the HTTP routes; areal/ is AReaL's API
sessions/   which session a request belongs to, admission, ends
calls/      one model call, from the decoded request to the committed answer: prompts/, sampling/
metrics/    Prometheus counters and scrapes
engines/    the engine pool: which engines serve, with which weights
access/     keys, limits, bounds
dialects/   the APIs that clients speak
"""
