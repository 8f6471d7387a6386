"""What the check of a trained policy said, and whether an operator lets it plan all the same."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. No policy was checked before."""
    with op.batch_alter_table("checkpoints") as table:
        table.add_column(sa.Column("verdict", sa.Text(), nullable=True))
        table.add_column(sa.Column("unchecked", sa.Boolean(), nullable=False, server_default=sa.false()))
    with op.batch_alter_table("checkpoints") as table:
        table.alter_column("unchecked", server_default=None)


def downgrade() -> None:
    """Undo."""
    with op.batch_alter_table("checkpoints") as table:
        table.drop_column("unchecked")
        table.drop_column("verdict")
