"""vLLM as an engine: its client, how it is started, and what we add inside it."""
