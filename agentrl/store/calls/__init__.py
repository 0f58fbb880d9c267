"""Model calls: intents, commits, deliveries, and the conversations they stand for."""
