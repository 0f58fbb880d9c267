"""How sessions end: seals, settled groups, silent clients, failures, late rewards, and roles judged at the end."""
