"""The recording proxy.

serving/    processes, sockets, connections
routes/     what is served over HTTP; areal/ is AReaL's API
sessions/   which session a request belongs to, admission, ends
calls/      one model call: from the decoded request to the committed answer
engines/    the engines: who serves, with which weights
access/     keys, limits, bounds
dialects/   the APIs that clients speak
"""
