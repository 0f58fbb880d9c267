"""Processes and sockets: worker processes behind one listening socket, and bounded connections."""
