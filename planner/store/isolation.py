"""Find what is to blame where many records are written together. Pure."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from stageloom.planner.store.database import is_of_the_record

T = TypeVar("T")


def isolated(
    keep: Callable[[Sequence[T]], None], records: Sequence[T], blame: Callable[[T, Exception], None]
) -> None:
    """Keep records in one transaction; where one makes that fail, keep all the others and `blame` that one.

    Halves the records until it is found: k of n that cannot be kept take about 2 k log2 n transactions.

    Raises:
        Exception: what `keep` raised where no record is to blame, such as a database that is away. Some of
            the records may be kept by then; to keep them again must change nothing.
    """
    if not records:
        return
    try:
        keep(records)
    except Exception as error:
        if not is_of_the_record(error):
            raise
        if len(records) == 1:
            blame(records[0], error)
            return
    else:
        return
    middle = len(records) // 2
    for half in (records[:middle], records[middle:]):
        isolated(keep, half, blame)
