"""agentrl turns any LLM agent into a trainable one."""

__version__ = "0.1.0"
