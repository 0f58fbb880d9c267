"""The key of a conversation without the text beside tool calls, for clients that drop this text."""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE interactions ADD COLUMN textless_key VARCHAR(64)")


def downgrade() -> None:
    op.execute("ALTER TABLE interactions DROP COLUMN textless_key")
