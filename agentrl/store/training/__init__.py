"""What the trainer reads and writes: leases, steps, trajectories, rewards and returns."""
