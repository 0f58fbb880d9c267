"""Version files through memory that hosts share: a Mooncake store, or windows of a peer's memory read through NIXL."""
