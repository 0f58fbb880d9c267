"""The results of a run, as pages show them: steps with their batches, groups and episodes, tasks, evaluations."""
