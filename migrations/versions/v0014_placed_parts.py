"""The parts of a run that a scheduler places, and the processes of each part."""

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

PARTS = """
CREATE TABLE parts (
    run_id VARCHAR(32) NOT NULL,
    name VARCHAR(100) NOT NULL,
    spec JSON NOT NULL,
    wanted VARCHAR(16) NOT NULL,
    attempt INTEGER NOT NULL,
    deaths JSON NOT NULL,
    failure TEXT,
    CONSTRAINT pk_parts PRIMARY KEY (run_id, name),
    CONSTRAINT ck_parts_wanted CHECK (wanted IN ('running', 'stopped')),
    CONSTRAINT fk_parts_run_id FOREIGN KEY(run_id) REFERENCES runs (id)
)
"""
RANKS = """
CREATE TABLE part_ranks (
    run_id VARCHAR(32) NOT NULL,
    part VARCHAR(100) NOT NULL,
    rank INTEGER NOT NULL,
    runner VARCHAR(32) NOT NULL,
    host VARCHAR(255) NOT NULL,
    address VARCHAR(255) NOT NULL,
    state VARCHAR(16) NOT NULL,
    attempt INTEGER,
    ports JSON NOT NULL,
    pid INTEGER,
    status INTEGER,
    starts INTEGER NOT NULL,
    claimed_at FLOAT NOT NULL,
    leased_until FLOAT NOT NULL,
    CONSTRAINT pk_part_ranks PRIMARY KEY (run_id, part, rank),
    CONSTRAINT ck_part_ranks_state CHECK (state IN ('waiting', 'running', 'ended')),
    CONSTRAINT fk_part_ranks_run_id FOREIGN KEY(run_id) REFERENCES runs (id)
)
"""


def upgrade() -> None:
    op.execute(PARTS)
    op.execute(RANKS)


def downgrade() -> None:
    op.execute("DROP TABLE part_ranks")
    op.execute("DROP TABLE parts")
