"""Whom the planner asks for the plans of a re-plan."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    with op.batch_alter_table("replan_settings", schema=None) as batch_op:
        batch_op.add_column(sa.Column("proposer", sa.String(length=16), nullable=False, server_default="all"))
    with op.batch_alter_table("replan_settings", schema=None) as batch_op:
        batch_op.alter_column("proposer", server_default=None)
