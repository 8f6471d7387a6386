"""Labels of devices, and rollouts of model versions to the devices that have them."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "device_labels",
        sa.Column("device", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("value", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.name"]),
        sa.PrimaryKeyConstraint("device", "name"),
    )
    op.create_index("device_labels_by_value", "device_labels", ["name", "value"])
    op.create_table(
        "rollouts",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("model", sa.String(64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("artifact", sa.String(64), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("waves", sa.Text(), nullable=False),
        sa.Column("max_failed", sa.BigInteger(), nullable=False),
        sa.Column("reach_s", sa.Double(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("wave", sa.BigInteger(), nullable=False),
        sa.Column("confirmed", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at_us", sa.BigInteger(), nullable=False),
        sa.Column("changed_at_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_at_us", sa.BigInteger(), nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_index("ix_rollouts_state", "rollouts", ["state"])
    op.create_table(
        "rollout_devices",
        sa.Column("rollout", sa.String(64), nullable=False),
        sa.Column("device", sa.String(64), nullable=False),
        sa.Column("wave", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("old_plan", sa.String(64), nullable=True),
        sa.Column("new_plan", sa.String(64), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("changed_at_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["rollout"], ["rollouts.name"]),
        sa.ForeignKeyConstraint(["device"], ["devices.name"]),
        sa.PrimaryKeyConstraint("rollout", "device"),
    )
    op.create_index("rollouts_by_device", "rollout_devices", ["device", "state"])
