"""The pages of what a run has made: steps, tasks, evaluations."""
