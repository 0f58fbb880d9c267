"""The prompt of a call: an earlier call's exact tokens and what follows them, or a full rendering; and why it forks."""
