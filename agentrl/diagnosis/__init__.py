"""Diagnoses a session: its token tree, its forks, and whether it can be trained.

trace (store or HTTP) ─► record ─► forks, figures ─► verdict ─► report
"""
