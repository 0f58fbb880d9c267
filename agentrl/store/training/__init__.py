"""Tables of training: leases, steps, trajectories, rewards and returns."""
