"""Events are found by device: each keeps a bounded number of them."""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_index("events_by_device", "events", ["device", "id"])
