"""Files that exports and backups make: where they are, and that none stays if it cannot be written."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageloom.planner.api.handlers import service
from stageloom.planner.api.handlers.models import model_export
from stageloom.planner.api.handlers.service import make_backup
from stageloom.planner.schema.model import ModelExportRequest
from stageloom.planner.schema.service import BackupRequest
from stageloom.shared.errors import StorageError
from tests.store.helpers import add_model
from tests.store.migrated import new_store


def test_an_export_is_made_beside_the_database_and_one_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    store = new_store(home)
    add_model(store, tmp_path)
    api: Any = SimpleNamespace(reader=store, config=SimpleNamespace(data_dir=home))
    call: Any = SimpleNamespace()
    made = model_export(api, ModelExportRequest(model="relu"), call)
    assert (made.parent, made.read_bytes()) == (home, b"relu")
    made.unlink()
    before = set(home.iterdir())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space"):
        model_export(api, ModelExportRequest(model="relu"), call)
    assert set(home.iterdir()) == before
    store.close()


def test_a_backup_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StorageError("no space", remedy="")

    api: Any = SimpleNamespace(config=SimpleNamespace(data_dir=tmp_path, database_url=""))
    monkeypatch.setattr(service, "backup", full)
    with pytest.raises(StorageError):
        make_backup(api, BackupRequest(), api)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(service, "backup", lambda data_dir, url, path, keys: path.write_bytes(b"all"))
    made = make_backup(api, BackupRequest(), api)
    assert (made.parent, made.read_bytes(), list(tmp_path.iterdir())) == (tmp_path, b"all", [made])
