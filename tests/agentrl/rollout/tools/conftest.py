"""A scripted model for the tool loop."""

from scripted_model import extra, model, said  # noqa: F401 - fixtures
