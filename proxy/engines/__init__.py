"""The engines behind the proxy: which ones serve, with which weights, and how a version is published."""
