"""Which plan won on a device under which arrivals."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "regimes",
        sa.Column("device", sa.String(64), nullable=False),
        sa.Column("boot", sa.BigInteger(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("environment", sa.String(128), nullable=False),
        sa.Column("won", sa.String(64), nullable=False),
        sa.Column("won_structure", sa.String(64), nullable=False),
        sa.Column("lost_structure", sa.String(64), nullable=False),
        sa.Column("loads", sa.LargeBinary(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("device", "boot", "sequence"),
    )
