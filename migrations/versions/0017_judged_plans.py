"""What a re-plan's candidates were predicted to do at the alarm's arrivals."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_FIGURES = ("p50_s", "share_in_time", "chance")


def upgrade() -> None:
    """Apply; plans that were considered before have none."""
    for name in _FIGURES:
        op.add_column("considered_plans", sa.Column(name, sa.Double(), nullable=True))
