"""Keys in addition to the first key of a run or session: named, expiring, revoked. A row overrides those first keys."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """CREATE TABLE keys (
            id VARCHAR(32) NOT NULL,
            run_id VARCHAR(32) NOT NULL,
            session_id VARCHAR(32),
            power VARCHAR(16) NOT NULL,
            name VARCHAR(100) NOT NULL,
            key_hash VARCHAR(64) NOT NULL,
            created_at FLOAT NOT NULL,
            changed_at FLOAT NOT NULL,
            expires_at FLOAT,
            revoked_at FLOAT,
            CONSTRAINT pk_keys PRIMARY KEY (id),
            CONSTRAINT fk_keys_run_id FOREIGN KEY (run_id) REFERENCES runs (id),
            CONSTRAINT fk_keys_session_id FOREIGN KEY (session_id) REFERENCES sessions (id),
            CONSTRAINT ck_keys_power CHECK (power IN ('admin', 'run', 'session'))
        )"""
    )
    op.execute("CREATE UNIQUE INDEX uq_keys_hash ON keys (run_id, key_hash)")
    op.execute("CREATE INDEX ix_keys_session_id ON keys (session_id)")
    op.execute("CREATE INDEX ix_keys_changed ON keys (run_id, changed_at)")


def downgrade() -> None:
    op.execute("DROP TABLE keys")
