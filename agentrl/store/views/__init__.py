"""Figures of a whole run that a process keeps, so that a reader waits only for what is new."""
