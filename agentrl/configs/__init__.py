"""A run's configuration, one section per part of the system. Imports no torch."""
