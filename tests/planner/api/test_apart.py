"""What is computed beside the planner's process: how it fails, and how much of it may wait."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stageloom.planner.api.apart import MOST_OPEN, StoreReaders
from stageloom.planner.store.models import model_infos
from stageloom.planner.store.store import ReadStore
from stageloom.shared.errors import NotFoundError, UnavailableError
from tests.store.helpers import add_model
from tests.store.migrated import new_store


def names(store: ReadStore) -> list[str]:
    return [info.model for info in store.read(model_infos)]


def lost(store: ReadStore) -> None:
    raise NotFoundError("it is not here", remedy="look elsewhere")


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[StoreReaders]:
    with closing(new_store(tmp_path)) as store:
        add_model(store, tmp_path)
    with closing(StoreReaders(tmp_path, "")) as made:
        yield made


def test_a_function_reads_the_store_elsewhere_and_its_error_comes_back_whole(readers: StoreReaders) -> None:
    assert readers.submit(names).result(30) == ["relu"]
    with pytest.raises(NotFoundError) as caught:
        readers.submit(lost).result(30)
    assert (caught.value.cause, caught.value.remedy) == ("it is not here", "look elsewhere")


def test_no_more_than_so_many_wait(readers: StoreReaders) -> None:
    waiting = [readers.submit(names) for _ in range(MOST_OPEN)]
    with pytest.raises(UnavailableError, match="ask again"):
        readers.submit(names)
    assert all(future.result(60) == ["relu"] for future in waiting)
    assert readers.submit(names).result(30) == ["relu"]
