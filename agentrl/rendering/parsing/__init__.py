"""Parses sampled text to messages, with reasoning and tool calls in all output formats."""
