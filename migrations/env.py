"""How Alembic reaches the database: through `stageloom.planner.store`, with its transactions and its
settings."""

from alembic import context

from stageloom.planner.store.database import Database
from stageloom.planner.store.tables import Table
from stageloom.shared.failpoint import failpoint


def run() -> None:
    """Run the wanted migrations in one transaction."""
    database: Database = context.config.attributes["database"]
    with database.engine.begin() as connection:
        context.configure(
            connection=connection,
            target_metadata=Table.metadata,
            render_as_batch=database.is_sqlite,  # SQLite cannot alter most things in place
            transactional_ddl=True,  # SQLite's is, once the driver does not begin and commit by itself
        )
        with context.begin_transaction():
            context.run_migrations()
            failpoint("planner.migration.within")


run()
