"""The models of a run: loading, sharding, attention, heads and adapters."""
