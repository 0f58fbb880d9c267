"""Alembic's entry: migrates over the connection that `Database.upgrade` hands in."""

from alembic import context

from agentrl.store.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=connection.dialect.name == "sqlite")
with context.begin_transaction():
    context.run_migrations()
