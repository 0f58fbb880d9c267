"""`agentrl doctor`: runs an agent once, or takes a recorded session, and shows its diagnosis.

COMMAND ─► trial (temporary engine and proxy) ─┬─► diagnosis ─► screen or JSON
recorded session ──────────────────────────────┘
"""
