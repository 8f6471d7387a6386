"""Telemetry is rolled up, and rows that a restored database has lost are counted."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "telemetry_rollups",
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("width_s", sa.BigInteger(), nullable=False),
        sa.Column("begin_us", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("device", "width_s", "begin_us", "kind", "subject"),
        sqlite_with_rowid=False,
    )
    _add_settled_and_lost()


def _add_settled_and_lost() -> None:
    """A ledger knew how many rows it stored, and not which: what comes again must be told apart from now on.

    Every row below `produced` has left its device, so none of them comes for the first time; rows above it
    are told by the newest one stored. What a ledger has never been able to balance is what was lost.
    """
    columns = ("lost", "settled")
    with op.batch_alter_table("telemetry_ledgers") as table:
        for name in columns:
            table.add_column(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    op.execute(
        """
        UPDATE telemetry_ledgers SET
            lost = CASE WHEN produced > stored + dropped THEN produced - stored - dropped ELSE 0 END,
            settled = (
                SELECT CASE WHEN above > produced THEN above ELSE produced END FROM (
                    SELECT coalesce(max(sequence) + 1, 0) AS above FROM telemetry
                    WHERE telemetry.device = telemetry_ledgers.device
                    AND telemetry.boot = telemetry_ledgers.boot
                ) AS newest
            )
        """
    )
    with op.batch_alter_table("telemetry_ledgers") as table:
        for name in columns:
            table.alter_column(name, server_default=None)
