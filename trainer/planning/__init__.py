"""Traces the trainer's step on a fake accelerator: memory, communication and time of a run before it is paid for."""
