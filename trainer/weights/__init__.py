"""Weight versions from the ranks' parameters to folders: every rank writes its own share. And the exported model."""
