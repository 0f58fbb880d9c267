"""Inference engines: the SGLang client, its event stream, server processes, and request validation."""
