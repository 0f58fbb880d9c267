"""OpenAI Chat Completions and Completions."""
