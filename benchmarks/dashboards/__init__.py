"""A large generated run, and what the pages of a dashboard read of it."""
