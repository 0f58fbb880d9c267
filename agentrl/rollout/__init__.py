"""Rollout workers: they ask the proxy for groups, run agents, and report rewards, by HTTP alone."""
