"""Runs agents in processes of their own, so that one that blocks or crashes stops neither others nor the heartbeat."""
