"""SGLang on a CPU: our platform plugin, and faster layers for it."""
