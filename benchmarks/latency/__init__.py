"""What benchmarks/asynchrony.py measures with: an environment whose tools are slow, and runs in it."""
