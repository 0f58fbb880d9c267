"""Replays: groups with a rare success that later steps train once more."""
