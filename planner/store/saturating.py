"""Sums in SQL that end at the wire's largest count.

A sum of integers fails on SQLite above 2**63, which a thousand of the largest counts reach. Floating point
numbers are exact up to the wire's largest count, and above it only that they are above it matters.
"""

from typing import Any

from sqlalchemy import ColumnElement, Float, cast, func
from sqlalchemy.orm import InstrumentedAttribute

from stageloom.shared.messages.base import MOST


def sum_of(column: InstrumentedAttribute[int]) -> ColumnElement[float]:
    """The sum of a column of counts, for `saturated`; 0 over no rows."""
    return func.coalesce(func.sum(cast(column, Float(53))), 0.0)


def saturated(total: Any) -> int:
    """What `sum_of` found, as a count."""
    return min(int(total or 0), MOST)
