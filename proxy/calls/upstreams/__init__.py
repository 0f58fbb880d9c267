"""Calls of other models: passed on to their servers, recorded, and left out of training."""
