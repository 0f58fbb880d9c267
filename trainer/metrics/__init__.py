"""What a step measures, and where the figures go."""
