"""A scripted model for agents with tools."""

from scripted_model import extra, model, said  # noqa: F401 - fixtures
