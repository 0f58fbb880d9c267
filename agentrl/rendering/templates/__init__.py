"""Renders messages to token ids: chat templates, model families, and the openings of tool calls."""
