"""The engine's side of prepared versions: fetch, stage beside the weights in use, swap; the plugin of SGLang."""
