"""How a run gets its tasks: what its datasets contain, and how they are stored."""
