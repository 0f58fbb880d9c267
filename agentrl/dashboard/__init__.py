"""Pages in HTML for people."""
