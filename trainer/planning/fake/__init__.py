"""The fake accelerator: the device, its module, what it knows, and how it attends."""
