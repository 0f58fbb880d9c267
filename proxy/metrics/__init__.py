"""Prometheus metrics of the proxy."""
