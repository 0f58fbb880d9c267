"""One database: connections, transactions, the group commit, and values packed as bytes."""
