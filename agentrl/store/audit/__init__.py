"""Checks of a run's promises from its rows."""
