"""What devices can run plans with, what models take on their executors, and what costs were measured on."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_COSTS = (
    *("device_class", "artifact", "batch", "operator"),
    *("median_us", "spread_us", "runs", "measured_on", "measured_at_us"),
)


def upgrade() -> None:
    """Apply. Operators that were measured before keep an empty executor: what the agent was set to."""
    op.create_table(
        "machines",
        sa.Column("device", sa.String(64), nullable=False),
        sa.Column("cores", sa.Text(), nullable=False),
        sa.Column("executors", sa.Text(), nullable=False),
        sa.Column("intra_op_threads", sa.BigInteger(), nullable=False),
        sa.Column("told_at_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.name"]),
        sa.PrimaryKeyConstraint("device"),
    )
    op.create_table(
        "executor_times",
        sa.Column("device", sa.String(64), nullable=False),
        sa.Column("artifact", sa.String(64), nullable=False),
        sa.Column("executor", sa.String(128), nullable=False),
        sa.Column("intra_op_threads", sa.BigInteger(), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.Column("environment", sa.String(128), nullable=False),
        sa.Column("time_us", sa.Double(), nullable=True),
        sa.Column("runs", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("measured_at_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.name"]),
        sa.PrimaryKeyConstraint("device", "artifact", "executor", "intra_op_threads", "batch"),
    )
    for name, kind, before in (("executor", sa.String(128), ""), ("intra_op_threads", sa.BigInteger(), "0")):
        with op.batch_alter_table("profiles") as table:
            table.add_column(sa.Column(name, kind, nullable=False, server_default=before))
        with op.batch_alter_table("profiles") as table:
            table.alter_column(name, server_default=None)
    # A column joins the primary key: neither database adds one to it in place alike.
    op.rename_table("operator_costs", "operator_costs_before")
    op.create_table(
        "operator_costs",
        sa.Column("device_class", sa.String(128), nullable=False),
        sa.Column("executor", sa.String(128), nullable=False),
        sa.Column("artifact", sa.String(64), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.Column("operator", sa.BigInteger(), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=False),
        sa.Column("spread_us", sa.Double(), nullable=False),
        sa.Column("runs", sa.BigInteger(), nullable=False),
        sa.Column("measured_on", sa.String(64), nullable=False),
        sa.Column("measured_at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "device_class", "executor", "artifact", "batch", "operator", name="operator_costs_by_executor"
        ),
    )
    columns = ", ".join(_COSTS)
    op.execute(
        f"INSERT INTO operator_costs ({columns}, executor) SELECT {columns}, '' FROM operator_costs_before"
    )
    op.drop_table("operator_costs_before")
