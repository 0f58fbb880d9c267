"""The engines behind the proxy: who serves, with which weights, and how a version is published."""
