"""The policy that a device plans with alone."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    with op.batch_alter_table("desired", schema=None) as batch_op:
        batch_op.add_column(sa.Column("policy", sa.String(length=64), nullable=True))
