"""What benchmarks/fleet.py measures with: replicas in one process, and real proxies over a fleet of fake engines."""
