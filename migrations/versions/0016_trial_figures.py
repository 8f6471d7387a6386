"""What the two plans of a trial were compared by, and both ratios."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_RATIOS = ("latency_ratio", "busy_ratio")


def upgrade() -> None:
    """Apply. Trials of before have no figure: busy seconds and tasks per second were not told apart."""
    for name in ("trials", "replans"):
        with op.batch_alter_table(name) as table:
            table.add_column(sa.Column("figure", sa.Text(), nullable=False, server_default=""))
        with op.batch_alter_table(name) as table:
            table.alter_column("figure", server_default=None)
    with op.batch_alter_table("trials") as table:
        for name in _RATIOS:
            table.add_column(sa.Column(name, sa.Double(), nullable=True))


def downgrade() -> None:
    """Undo."""
    with op.batch_alter_table("trials") as table:
        for name in reversed(_RATIOS):
            table.drop_column(name)
    for name in ("replans", "trials"):
        with op.batch_alter_table(name) as table:
            table.drop_column("figure")
