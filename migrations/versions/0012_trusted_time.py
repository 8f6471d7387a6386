"""The time up to which the clock is believed: at first the newest that the planner stored by its own."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_NEWEST = """
INSERT INTO clock_trust (id, trusted_us, confirmed_us)
SELECT 1, newest_us, 0 FROM (
    SELECT MAX(stored_us) AS newest_us FROM (
        SELECT MAX(at_us) AS stored_us FROM events
        UNION ALL SELECT MAX(last_seen_us) FROM devices
        UNION ALL SELECT MAX(decided_at_us) FROM generations
        UNION ALL SELECT MAX(created_at_us) FROM planner
    ) AS stored
) AS newest WHERE newest_us IS NOT NULL
"""


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "clock_trust",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("trusted_us", sa.BigInteger(), nullable=False),
        sa.Column("confirmed_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.execute(_NEWEST)
