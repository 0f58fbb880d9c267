"""One module for each environment that benchmarks/environments.py runs."""
