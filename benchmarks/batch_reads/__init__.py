"""A recorded batch of long trajectories, and ranks that read it up to their first forward pass."""
