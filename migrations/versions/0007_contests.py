"""What plans of a contest were worth, and when that was known."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    with op.batch_alter_table("considered_plans", schema=None) as batch_op:
        batch_op.add_column(sa.Column("judged_at_s", sa.Double(), nullable=True))
        batch_op.add_column(sa.Column("throughput_per_s", sa.Double(), nullable=True))
        batch_op.add_column(sa.Column("p99_s", sa.Double(), nullable=True))
