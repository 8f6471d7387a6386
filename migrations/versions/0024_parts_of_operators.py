"""Parts of operators that plans may split over two resources, and what it takes to hand over to another."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. No profile asked for parts before."""
    with op.batch_alter_table("profiles") as table:
        table.add_column(sa.Column("parts", sa.BigInteger(), nullable=False, server_default="0"))
    with op.batch_alter_table("profiles") as table:
        table.alter_column("parts", server_default=None)
    op.create_table(
        "part_costs",
        sa.Column("device_class", sa.String(128), nullable=False),
        sa.Column("executor", sa.String(128), nullable=False),
        sa.Column("artifact", sa.String(64), nullable=False),
        sa.Column("operator", sa.BigInteger(), nullable=False),
        sa.Column("axis", sa.String(8), nullable=False),
        sa.Column("extent", sa.BigInteger(), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=False),
        sa.Column("spread_us", sa.Double(), nullable=False),
        sa.Column("runs", sa.BigInteger(), nullable=False),
        sa.Column("measured_on", sa.String(64), nullable=False),
        sa.Column("measured_at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("device_class", "executor", "artifact", "operator", "axis", "extent"),
    )
    op.create_table(
        "handover_costs",
        sa.Column("device_class", sa.String(128), nullable=False),
        sa.Column("executor", sa.String(128), nullable=False),
        sa.Column("handover_us", sa.Double(), nullable=False),
        sa.Column("copy_bytes_per_s", sa.Double(), nullable=False),
        sa.Column("measured_on", sa.String(64), nullable=False),
        sa.Column("measured_at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("device_class", "executor"),
    )


def downgrade() -> None:
    """Undo."""
    op.drop_table("handover_costs")
    op.drop_table("part_costs")
    with op.batch_alter_table("profiles") as table:
        table.drop_column("parts")
