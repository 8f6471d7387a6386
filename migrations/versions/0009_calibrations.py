"""Costs that are a device's own since it drifted; what re-plans remark; whether they attach policies."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "calibrations",
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("environment", sa.String(length=128), nullable=False),
        sa.Column("costs_key", sa.String(length=128), nullable=False),
        sa.Column("ratio", sa.Double(), nullable=False),
        sa.Column("steps_since_us", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.name"]),
        sa.PrimaryKeyConstraint("device", "environment"),
    )
    with op.batch_alter_table("replans") as table:
        table.add_column(sa.Column("remark", sa.Text(), nullable=False, server_default=""))
    with op.batch_alter_table("replans") as table:
        table.alter_column("remark", server_default=None)
    with op.batch_alter_table("replan_settings") as table:
        table.add_column(sa.Column("attach", sa.Boolean(), nullable=False, server_default=sa.true()))
    with op.batch_alter_table("replan_settings") as table:
        table.alter_column("attach", server_default=None)
