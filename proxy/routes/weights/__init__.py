"""Routes of weight versions: publishing them, their files."""
