"""Child processes that never outlive their parent.

parent ──pipe──► guard.py ──► command (a process group of its own)
the parent closes the pipe, or dies  ──►  the guard sends SIGTERM, waits, sends SIGKILL to the group

children.py   start, stop and kill what runs behind a guard
parent_watch.py   ends a process of ours when its parent dies
restarts.py   how long to wait before a restart
"""
