"""Checkpoints of training steps: their folders, and how ranks write and read them."""
