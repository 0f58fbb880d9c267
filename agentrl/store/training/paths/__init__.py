"""Paths of calls as the trainer reads them: outlines first, then the tokens, in parts."""
