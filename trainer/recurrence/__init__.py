"""Layers that carry a state from token to token, computed along the forest of a microbatch."""
