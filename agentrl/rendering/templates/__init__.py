"""Messages to token ids: chat templates, hand-written families, and the openings of tool calls."""
