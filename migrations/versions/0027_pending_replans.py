"""Re-plans under way are found without reading those that ended."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    pending = sa.text("outcome = 'pending'")
    op.create_index(
        "pending_replans", "replans", ["device", "replan"], sqlite_where=pending, postgresql_where=pending
    )


def downgrade() -> None:
    """Undo."""
    op.drop_index("pending_replans", "replans")
