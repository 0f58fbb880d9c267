"""The delivery state of answers, so that a retry gets the answer that its caller missed.

Calls from before this revision count as delivered.
"""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

OF_INTERACTIONS = [
    "request_id VARCHAR(32)",
    "repeat_key VARCHAR(64)",
    "holder VARCHAR(64)",
    "delivery VARCHAR(16) NOT NULL DEFAULT 'given' CONSTRAINT ck_interactions_delivery"
    " CHECK (delivery IN ('open', 'given', 'free', 'unsure'))",
]


def upgrade() -> None:
    for column in OF_INTERACTIONS:
        op.execute(f"ALTER TABLE interactions ADD COLUMN {column}")
    op.execute("CREATE INDEX ix_interactions_open ON interactions (holder) WHERE delivery = 'open'")
    op.execute(
        "ALTER TABLE interaction_data ADD COLUMN top_logprobs BYTEA"
        if _postgresql()
        else "ALTER TABLE interaction_data ADD COLUMN top_logprobs BLOB"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE interaction_data DROP COLUMN top_logprobs")
    op.execute("DROP INDEX ix_interactions_open")
    for column in reversed(OF_INTERACTIONS):
        op.execute(f"ALTER TABLE interactions DROP COLUMN {column.split()[0]}")


def _postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"
