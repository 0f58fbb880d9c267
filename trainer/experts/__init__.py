"""Mixture-of-experts models: replayed routing, load balance."""
