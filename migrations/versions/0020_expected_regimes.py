"""Which plan is expected to be best under arrivals that recur."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "expected_regimes",
        sa.Column(
            "number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, nullable=False
        ),
        sa.Column("device", sa.String(64), nullable=False),
        sa.Column("environment", sa.String(128), nullable=False),
        sa.Column("plan", sa.String(64), nullable=False),
        sa.Column("chance", sa.Double(), nullable=True),
        sa.Column("loads", sa.LargeBinary(), nullable=False),
        sa.Column("found_at_us", sa.BigInteger(), nullable=False),
    )
    op.create_index("expected_by_device", "expected_regimes", ["device", "environment"])
