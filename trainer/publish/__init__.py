"""How a weight version gets to the engines: its folder, its tensors, and the request to the proxy."""
