"""Batches: what a trainer knows of a batch without its tokens, and how it divides one among ranks."""
