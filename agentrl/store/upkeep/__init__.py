"""Upkeep of a database in use: retention, vacuum, backup."""
