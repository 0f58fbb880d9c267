"""How a step's rewards were scaled for training, and the statistics that it was done with."""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("steps", sa.Column("reward_scaling", sa.JSON))


def downgrade() -> None:
    op.drop_column("steps", "reward_scaling")
