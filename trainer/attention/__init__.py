"""Attention over the forest of a microbatch, in memory that grows linearly with its tokens."""
