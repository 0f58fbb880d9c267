"""Sessions at the proxy: which session a request belongs to, how sessions are admitted, and how they end."""
