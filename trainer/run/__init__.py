"""One run of reinforcement learning: its state, its resume, and the work before and after a step's update."""
