"""Requests that control an engine: its weights, its memory, its adapters, and versions that it prepares."""
