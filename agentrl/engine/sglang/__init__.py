"""SGLang as an engine: its client, how it is started, and our plugins inside it."""
