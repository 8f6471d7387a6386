"""What the twin predicted."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "predictions",
        sa.Column("prediction", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=True),
        sa.Column("plan", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("twin", sa.Text(), nullable=False),
        sa.Column("arrivals", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("figures", sa.Text(), nullable=False),
        sa.Column("made_at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("prediction"),
    )
    with op.batch_alter_table("predictions", schema=None) as batch_op:
        batch_op.create_index("predictions_by_plan", ["device", "digest", "made_at_us"], unique=False)
