"""Sampling an answer on the engines: parameters, segments, stop strings."""
