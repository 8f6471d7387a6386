"""Which plan the winner of a re-plan's trial took the place of."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. Of trials before nobody knows."""
    with op.batch_alter_table("regimes") as table:
        table.add_column(sa.Column("replaced", sa.String(64), nullable=True))


def downgrade() -> None:
    """Undo."""
    with op.batch_alter_table("regimes") as table:
        table.drop_column("replaced")
