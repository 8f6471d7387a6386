"""Outputs of two versions of models: within what they are to agree, and what a trial found."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. Nothing was compared before."""
    with op.batch_alter_table("desired") as table:
        table.add_column(sa.Column("compare_outputs", sa.Double(), nullable=True))
    with op.batch_alter_table("trials") as table:
        table.add_column(sa.Column("outputs", sa.Text(), nullable=True))
    op.create_index("trials_of_plans", "trials", ["candidate", "how"])


def downgrade() -> None:
    """Undo."""
    op.drop_index("trials_of_plans", "trials")
    with op.batch_alter_table("trials") as table:
        table.drop_column("outputs")
    with op.batch_alter_table("desired") as table:
        table.drop_column("compare_outputs")
