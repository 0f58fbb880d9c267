"""Groups and sessions: admission, ends, liveness, and the tree of sub-agents."""
