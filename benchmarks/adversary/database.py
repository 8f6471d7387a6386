"""Postgres for attacks: a server from a wheel, or a database that somebody names."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg


@contextmanager
def postgres(url: str) -> Iterator[str]:
    """URL of a database that may be emptied; empty text where there is none."""
    if url:
        yield url
        return
    from tests.store.embedded import binaries, postgres_server

    programs = binaries()
    if programs is None:
        yield ""
        return
    with postgres_server(programs) as found:
        yield found


def fresh_database(url: str) -> str:
    """Empty the database and give back its URL."""
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("drop schema if exists public cascade")
        connection.execute("create schema public")
    return url
