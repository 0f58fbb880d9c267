"""The root and the depth of a sub-agent's session; the tokens that other models sampled."""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

COLUMNS = [
    ("sessions", "root_session_id VARCHAR(32) CONSTRAINT fk_sessions_root_session_id REFERENCES sessions (id)"),
    ("sessions", "depth INTEGER NOT NULL DEFAULT 0"),
    ("interactions", "upstream_tokens INTEGER NOT NULL DEFAULT 0"),
]
FILL = """
WITH RECURSIVE tree (id, root, depth) AS (
    SELECT id, id, 0 FROM sessions WHERE parent_session_id IS NULL
        AND id IN (SELECT parent_session_id FROM sessions WHERE parent_session_id IS NOT NULL)
    UNION ALL
    SELECT s.id, tree.root, tree.depth + 1 FROM sessions s JOIN tree ON s.parent_session_id = tree.id
)
UPDATE sessions SET root_session_id = tree.root, depth = tree.depth FROM tree
WHERE sessions.id = tree.id AND tree.depth > 0
"""


def upgrade() -> None:
    for table, column in COLUMNS:
        op.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
    op.execute(FILL)
    op.execute(
        "CREATE INDEX ix_sessions_root ON sessions (root_session_id, depth, id) WHERE root_session_id IS NOT NULL"
    )


def downgrade() -> None:
    op.execute("DROP INDEX ix_sessions_root")
    for table, column in reversed(COLUMNS):
        op.execute(f"ALTER TABLE {table} DROP COLUMN {column.split()[0]}")
