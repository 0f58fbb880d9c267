"""Where the parts of a run go: which host and which GPUs each engine and the trainer get, before anything starts."""
