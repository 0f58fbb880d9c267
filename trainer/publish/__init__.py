"""A weight version on its way to the engines: folder, tensors, and the request to the proxy."""
