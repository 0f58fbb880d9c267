"""The number of facts of each trained token, since newer trainers record the teacher's logprob too."""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("token_facts", sa.Column("facts", sa.Integer, nullable=False, server_default="9"))


def downgrade() -> None:
    op.execute("DELETE FROM token_facts WHERE facts > 9")
    op.drop_column("token_facts", "facts")
