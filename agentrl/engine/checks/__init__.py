"""What is checked before an engine is relied on: the folders that it loads, and the release of its server."""
