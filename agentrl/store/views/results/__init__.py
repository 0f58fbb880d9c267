"""What a run has made, as pages show it: steps with their batches, groups and episodes, tasks, evaluations."""
