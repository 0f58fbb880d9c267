"""A run's configuration, one section per part of the system. It loads no torch."""
