"""Fixtures of the store's tests: an empty store on SQLite, and on Postgres."""

from tests.store.conftest import clock, database_url, migrated_file, migration, postgres, store

__all__ = ["clock", "database_url", "migrated_file", "migration", "postgres", "store"]
