"""What trainings learn from."""

from pathlib import Path

import pytest

from tests.store.helpers import add_model, enrol
from tests.store.migrated import new_store


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A planner's data with two models and a device that ran nothing yet."""
    home = tmp_path_factory.mktemp("template") / "home"
    home.mkdir()
    store = new_store(home)
    add_model(store, home.parent, "relu", operators=6)
    add_model(store, home.parent, "wide", operators=8)
    enrol(store)
    store.close()
    return home
