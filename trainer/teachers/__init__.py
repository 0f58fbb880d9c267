"""Who teaches the trajectories of a step, what the teachers read, and teachers that are servers."""
