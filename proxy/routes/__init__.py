"""What the proxy serves: one module per group of HTTP routes."""
