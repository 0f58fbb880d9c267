"""AReaL's HTTP API, served by this proxy."""
