"""Versions of a model: artifacts behind one name, by number."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. What a name stood for becomes its version 1."""
    op.rename_table("models", "models_before")
    op.create_table(
        "models",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("versions_made", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="models_by_name"),
    )
    op.create_table(
        "model_versions",
        sa.Column("model", sa.String(64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("added_at_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.name"]),
        sa.ForeignKeyConstraint(["digest"], ["artifacts.digest"]),
        sa.PrimaryKeyConstraint("model", "number"),
        sa.UniqueConstraint("model", "digest"),
    )
    op.create_index("ix_model_versions_digest", "model_versions", ["digest"])
    op.execute("INSERT INTO models (name, versions_made) SELECT name, 1 FROM models_before")
    op.execute(
        "INSERT INTO model_versions (model, number, digest, added_at_us) "
        "SELECT name, 1, digest, added_at_us FROM models_before"
    )
    op.drop_table("models_before")
