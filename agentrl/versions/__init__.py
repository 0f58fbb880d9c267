"""Weight versions as files: their folders, what changed between two of them, and a host's copies. Imports no torch."""
