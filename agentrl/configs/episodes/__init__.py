"""Settings of what happens in episodes: how answers are scored."""
