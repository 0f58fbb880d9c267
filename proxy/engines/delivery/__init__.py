"""How a version reaches the engines: where they read it, prepared beside the one that serves, and swapped in waves."""
