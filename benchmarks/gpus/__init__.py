"""The parts of `make gpu` that are measured in their own process (benchmarks/gpu.py)."""
