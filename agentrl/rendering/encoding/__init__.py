"""Encodes text to token ids and decodes it: vocabularies, caches, incremental decoding."""
