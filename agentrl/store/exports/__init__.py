"""Rows of a run for exports, page by page, and their columns."""
