"""`agentrl doctor` and `agentrl engine check`: examine an agent, a recorded session or an engine, and show the report.

COMMAND ─► trial (temporary engine and proxy) ─┬─► diagnosis ─► screen or JSON
recorded session ──────────────────────────────┘
engine ─► engine_examination (facts, capabilities, 4 tokens) ─► screen or JSON
"""
