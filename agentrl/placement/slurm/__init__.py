"""Runs on many hosts by Slurm: one job, whose script starts a task runner for each process of each part."""
