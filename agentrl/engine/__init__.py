"""Inference engines: the SGLang client and its event stream, server processes, and the bounds of what is sent."""
