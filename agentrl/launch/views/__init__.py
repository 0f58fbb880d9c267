"""What a person sees of a run: its state, its curve, its summary, its logs."""
