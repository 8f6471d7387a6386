"""Plans that searches found and re-plans looked at."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "considered_plans",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("replan", sa.BigInteger(), nullable=True),
        sa.Column("device", sa.String(length=64), nullable=True),
        sa.Column("device_class", sa.String(length=128), nullable=False),
        sa.Column("serves", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("scheduler", sa.Text(), nullable=False),
        sa.Column("how", sa.String(length=32), nullable=False),
        sa.Column("verdict", sa.String(length=32), nullable=False),
        sa.Column("blocks", sa.BigInteger(), nullable=False),
        sa.Column("members_max", sa.BigInteger(), nullable=False),
        sa.Column("busy", sa.Double(), nullable=True),
        sa.Column("predicted", sa.Double(), nullable=True),
        sa.Column("measured", sa.Boolean(), nullable=False),
        sa.Column("search_s", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("number"),
    )
    with op.batch_alter_table("considered_plans", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_considered_plans_at_us"), ["at_us"], unique=False)
        batch_op.create_index("considered_plans_by_models", ["serves", "number"], unique=False)
