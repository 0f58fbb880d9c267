"""Pages: what each shows, read from the store in one transaction."""
