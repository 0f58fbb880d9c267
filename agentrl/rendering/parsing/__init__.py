"""Sampled text to messages: reasoning and tool calls in every output format."""
