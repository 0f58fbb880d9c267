"""What became of an agent's calls: the token tree of a session, why it forks, and whether it can be trained.

trace (store or HTTP) ─► record ─► forks, figures ─► verdict ─► report ─► screen or JSON
COMMAND ─► episode ────────┘
"""
