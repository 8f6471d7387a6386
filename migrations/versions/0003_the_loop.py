"""Alarms, re-plans, trials, measured stages."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "stage_costs",
        sa.Column("device_class", sa.String(length=128), nullable=False),
        sa.Column("executor", sa.String(length=128), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.Column("combined_block", sa.String(length=64), nullable=False),
        sa.Column("stage_digest", sa.String(length=64), nullable=False),
        sa.Column("members", sa.LargeBinary(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=False),
        sa.Column("spread_us", sa.Double(), nullable=False),
        sa.Column("runs", sa.BigInteger(), nullable=False),
        sa.Column("measured_on", sa.String(length=64), nullable=False),
        sa.Column("measured_at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("device_class", "executor", "batch", "combined_block", "stage_digest"),
    )
    op.create_table(
        "trials",
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("boot", sa.BigInteger(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("how", sa.Text(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("candidate", sa.String(length=64), nullable=False),
        sa.Column("control", sa.String(length=64), nullable=True),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("ratio", sa.Double(), nullable=True),
        sa.Column("ratio_low", sa.Double(), nullable=True),
        sa.Column("ratio_high", sa.Double(), nullable=True),
        sa.Column("pairs", sa.BigInteger(), nullable=False),
        sa.Column("began_us", sa.BigInteger(), nullable=False),
        sa.Column("decided_us", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("device", "boot", "sequence"),
    )
    with op.batch_alter_table("trials", schema=None) as batch_op:
        batch_op.create_index("trials_by_candidate", ["device", "candidate"], unique=False)

    op.create_table(
        "alarms",
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("boot", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("received_at_us", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["device"],
            ["devices.name"],
        ),
        sa.PrimaryKeyConstraint("device", "boot", "number"),
    )
    op.create_table(
        "replan_settings",
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("scheduler", sa.Text(), nullable=False),
        sa.Column("members_max", sa.BigInteger(), nullable=False),
        sa.Column("budget_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["device"],
            ["devices.name"],
        ),
        sa.PrimaryKeyConstraint("device"),
    )
    op.create_table(
        "replans",
        sa.Column("replan", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("boot", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("threshold", sa.Double(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("control", sa.String(length=64), nullable=True),
        sa.Column("begun_at_us", sa.BigInteger(), nullable=False),
        sa.Column("plan", sa.String(length=64), nullable=True),
        sa.Column("digest", sa.String(length=64), nullable=True),
        sa.Column("structure", sa.String(length=64), nullable=True),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("how", sa.Text(), nullable=False),
        sa.Column("predicted", sa.Double(), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("ratio", sa.Double(), nullable=True),
        sa.Column("ratio_low", sa.Double(), nullable=True),
        sa.Column("ratio_high", sa.Double(), nullable=True),
        sa.Column("pairs", sa.BigInteger(), nullable=False),
        sa.Column("trigger_to_decision_ms", sa.Double(), nullable=True),
        sa.Column("trigger_to_active_ms", sa.Double(), nullable=True),
        sa.Column("later_alarms", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["device"],
            ["devices.name"],
        ),
        sa.PrimaryKeyConstraint("replan"),
    )
    with op.batch_alter_table("replans", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_replans_device"), ["device"], unique=False)

    op.create_table(
        "stage_profiles",
        sa.Column("request", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("plan", sa.String(length=64), nullable=False),
        sa.Column("combined_blocks", sa.LargeBinary(), nullable=False),
        sa.Column("budget_s", sa.Double(), nullable=False),
        sa.Column("requested_at_us", sa.BigInteger(), nullable=False),
        sa.Column("answered_at_us", sa.BigInteger(), nullable=True),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["device"],
            ["devices.name"],
        ),
        sa.ForeignKeyConstraint(
            ["plan"],
            ["plans.name"],
        ),
        sa.PrimaryKeyConstraint("request"),
    )
    with op.batch_alter_table("stage_profiles", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_stage_profiles_device"), ["device"], unique=False)
