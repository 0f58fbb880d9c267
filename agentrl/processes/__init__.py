"""Child processes that never outlive their parent.

parent ──pipe──► guard.py ──► keeper ──► command (a process group of its own)
the parent closes the pipe, or dies  ──►  the keeper sends SIGTERM, waits, sends SIGKILL to all that the command started

children.py   start, stop and kill commands behind a guard
hosted.py     a child that answers requests over a socket
hosted_set.py those of a pool
template.py   forks hosted processes from one that has imported what they need
template_host.py   that process
parent_watch.py   ends a process of ours when its parent dies
restarts.py   how long to wait before a restart
"""
