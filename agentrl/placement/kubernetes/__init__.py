"""Runs on Kubernetes: manifests whose Jobs start a task runner for each process of each part."""
