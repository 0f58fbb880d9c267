"""Audits a run: checks its promises from its rows."""
