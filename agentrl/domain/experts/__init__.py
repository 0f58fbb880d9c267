"""The experts that a mixture-of-experts model chooses for its tokens."""
