"""Reward functions that a config names without a module: comparisons, mathematics, formats, code, other models."""
