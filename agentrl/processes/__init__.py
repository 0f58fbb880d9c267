"""Child processes that never outlive their parent.

parent ──pipe──► guard.py ──► keeper ──► command (a process group of its own)
the parent closes the pipe, or dies  ──►  the keeper sends SIGTERM, waits, sends SIGKILL to all that the command started

children.py   start, stop and kill commands behind a guard
parent_watch.py   ends a process of ours when its parent dies
restarts.py   how long to wait before a restart
"""
