"""Alembic's scripts, inside the package so that an installed wheel can migrate."""
