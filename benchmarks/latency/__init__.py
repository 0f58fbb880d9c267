"""The parts of benchmarks/asynchrony.py: an environment with slow tools, and training runs in it."""
