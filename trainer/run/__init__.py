"""One run of reinforcement learning: its state, and what happens around a step's update."""
