"""Who may call, how much, and how large: keys, limits and bounds."""
