"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""

    op.create_table(
        "artifacts",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("operators", sa.BigInteger(), nullable=False),
        sa.Column("base_cuts", sa.BigInteger(), nullable=False),
        sa.Column("opaque", sa.BigInteger(), nullable=False),
        sa.Column("added_at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_table(
        "devices",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("public_key", sa.String(length=40), nullable=False),
        sa.Column("revoked", sa.Boolean(), nullable=False),
        sa.Column("device_class", sa.Text(), nullable=False),
        sa.Column("agent_version", sa.Text(), nullable=False),
        sa.Column("enrolled_at_us", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_us", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
        sa.UniqueConstraint("public_key"),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=True),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_events_at_us"), ["at_us"], unique=False)

    op.create_table(
        "join_tokens",
        sa.Column("secret_digest", sa.String(length=64), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=True),
        sa.Column("created_at_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_us", sa.BigInteger(), nullable=False),
        sa.Column("used_at_us", sa.BigInteger(), nullable=True),
        sa.Column("used_by_key", sa.String(length=40), nullable=True),
        sa.Column("enrolled_as", sa.String(length=64), nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("secret_digest"),
    )
    op.create_table(
        "operator_costs",
        sa.Column("device_class", sa.String(length=128), nullable=False),
        sa.Column("artifact", sa.String(length=64), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.Column("operator", sa.BigInteger(), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=False),
        sa.Column("spread_us", sa.Double(), nullable=False),
        sa.Column("runs", sa.BigInteger(), nullable=False),
        sa.Column("measured_on", sa.String(length=64), nullable=False),
        sa.Column("measured_at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("device_class", "artifact", "batch", "operator"),
    )
    op.create_table(
        "planner",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("created_at_us", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "plans",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("wire", sa.LargeBinary(), nullable=False),
        sa.Column("scheduler", sa.Text(), nullable=False),
        sa.Column("created_at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    with op.batch_alter_table("plans", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_plans_digest"), ["digest"], unique=False)

    op.create_table(
        "schedules",
        sa.Column("device_class", sa.String(length=128), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.Column("combined_block", sa.String(length=64), nullable=False),
        sa.Column("scheduler", sa.String(length=128), nullable=False),
        sa.Column("stage_string", sa.Text(), nullable=False),
        sa.Column("found_at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("device_class", "batch", "combined_block", "scheduler"),
    )
    op.create_table(
        "telemetry",
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("boot", sa.BigInteger(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("device", "boot", "sequence"),
        sqlite_with_rowid=False,
    )
    with op.batch_alter_table("telemetry", schema=None) as batch_op:
        batch_op.create_index("telemetry_by_kind", ["device", "kind", "at_us"], unique=False)

    op.create_table(
        "telemetry_ledgers",
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("boot", sa.BigInteger(), nullable=False),
        sa.Column("produced", sa.BigInteger(), nullable=False),
        sa.Column("dropped", sa.BigInteger(), nullable=False),
        sa.Column("stored", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("device", "boot"),
    )
    op.create_table(
        "desired",
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("plan", sa.String(length=64), nullable=True),
        sa.Column("autonomy", sa.Text(), nullable=False),
        sa.Column("activation", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["device"],
            ["devices.name"],
        ),
        sa.ForeignKeyConstraint(
            ["plan"],
            ["plans.name"],
        ),
        sa.PrimaryKeyConstraint("device"),
    )
    op.create_table(
        "generations",
        sa.Column("position", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("plan", sa.String(length=64), nullable=True),
        sa.Column("digest", sa.String(length=64), nullable=True),
        sa.Column("decided_by", sa.Text(), nullable=False),
        sa.Column("decided_at_us", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("state_at_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["device"],
            ["devices.name"],
        ),
        sa.PrimaryKeyConstraint("position"),
        sa.UniqueConstraint("device", "epoch", "generation"),
    )
    op.create_table(
        "models",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("added_at_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["digest"],
            ["artifacts.digest"],
        ),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "profiles",
        sa.Column("request", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=64), nullable=False),
        sa.Column("artifact", sa.String(length=64), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.Column("budget_s", sa.Double(), nullable=False),
        sa.Column("requested_at_us", sa.BigInteger(), nullable=False),
        sa.Column("answered_at_us", sa.BigInteger(), nullable=True),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["artifact"],
            ["artifacts.digest"],
        ),
        sa.ForeignKeyConstraint(
            ["device"],
            ["devices.name"],
        ),
        sa.PrimaryKeyConstraint("request"),
    )
    with op.batch_alter_table("profiles", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_profiles_device"), ["device"], unique=False)

    op.create_table(
        "reported",
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("boot", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("seen", sa.String(length=64), nullable=True),
        sa.Column("active", sa.String(length=64), nullable=True),
        sa.Column("origin", sa.Text(), nullable=True),
        sa.Column("local_counter", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["device"],
            ["devices.name"],
        ),
        sa.PrimaryKeyConstraint("device"),
    )
