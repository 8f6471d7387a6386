"""Postgres for attacks: a server from a wheel, or a database that somebody names."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from benchmarks.adversary.postgres import binaries, postgres_server


@contextmanager
def postgres(url: str) -> Iterator[str]:
    """URL of a database that may be emptied; empty text where there is none."""
    programs = binaries()
    if url or programs is None:
        yield url
        return
    with postgres_server(programs) as server:
        yield server.url


def fresh_database(url: str) -> str:
    """Empty the database and give back its URL."""
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("drop schema if exists public cascade")
        connection.execute("create schema public")
    return url
