"""Trained policies."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "checkpoints",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("policy", sa.String(length=32), nullable=False),
        sa.Column("device_class", sa.String(length=128), nullable=False),
        sa.Column("artifacts", sa.Text(), nullable=False),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.Column("versions", sa.Text(), nullable=False),
        sa.Column("curves", sa.Text(), nullable=False),
        sa.Column("ratio", sa.Double(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("trained_at_us", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.create_index("checkpoints_by_use", ["policy", "device_class", "trained_at_us"], unique=False)
