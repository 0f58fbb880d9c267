"""One database: connections, transactions, the group commit, and how values become bytes."""
