"""Ready-made agents for runs that have a reward function: one answer, or several turns with feedback."""
