"""Text to token ids and back: vocabularies, caches, and incremental decoding."""
