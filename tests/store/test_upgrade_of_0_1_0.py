"""A populated database of version 0.1.0 is upgraded, and everything in it is read as before.

`tests/data/version_0_1_0.py` made it, by running that version.
"""

import gzip
import json
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from alembic import command
from sqlalchemy import Connection, MetaData, delete, insert, text

from stageloom.planner.cli.app import execute
from stageloom.planner.store import schema
from stageloom.planner.store.costs import operator_costs
from stageloom.planner.store.database import Database, sqlite_url
from stageloom.planner.store.desired import Push, push_wanted
from stageloom.planner.store.devices import device_info, device_infos
from stageloom.planner.store.events import newest_events
from stageloom.planner.store.generations import generation_history
from stageloom.planner.store.models import model_infos
from stageloom.planner.store.plans import plan_infos
from stageloom.planner.store.replans import replan_infos
from stageloom.planner.store.store import ReadStore, Store
from stageloom.planner.store.telemetry import telemetry_balance, telemetry_rows
from stageloom.planner.store.trials import trial_infos
from stageloom.planner.store.used_database import ARTIFACT_FOLDER, DATABASE_FILE
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import RowKind
from tests.data.version_0_1_0 import DEVICES, PROFILED, unpacked

_FILE = Path(__file__).parents[1] / "data" / "version_0_1_0.json.gz"
_REVISION = "0010"


def read_all(store: ReadStore) -> dict[str, Any]:
    """What `tests/data/version_0_1_0.py` read with version 0.1.0, read by this one."""
    history, _ = store.read(generation_history, None, limit=64)
    models = store.read(model_infos)
    kinds = tuple(RowKind)
    everything = {
        "devices": store.read(device_infos),
        "models": models,
        "plans": store.read(plan_infos),
        "history": history,
        "events": store.read(newest_events),
        "balance": store.read(telemetry_balance)._asdict(),
        **{f"rows of {name}": store.read(telemetry_rows, DeviceId(name), kinds) for name in DEVICES},
        **{f"replans of {name}": store.read(replan_infos, DeviceId(name)) for name in DEVICES},
        **{f"trials of {name}": store.read(trial_infos, DeviceId(name)) for name in DEVICES},
        "graph operators": [len(store.graph(model.digest).operators) for model in models],
        "costs": [repr(cost) for cost in store.read(operator_costs, "cpu-test", PROFILED).values()],
    }
    values: dict[str, Any] = json.loads(msgspec.json.encode(everything))
    return values


def kept() -> Any:
    """`tables`, `artifacts` and `read`, what version 0.1.0 read of them."""
    return json.loads(gzip.decompress(_FILE.read_bytes()))


def lay_out(home: Path, database_url: str, version: Any) -> None:
    """Make a data directory and database as version 0.1.0 left them."""
    for blob in map(bytes.fromhex, version["artifacts"]):
        digest = digest_bytes([blob])
        path = home / ARTIFACT_FOLDER / digest[:2] / digest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(blob)
    database = Database(database_url or sqlite_url(home / DATABASE_FILE))
    command.upgrade(schema.alembic_config(database), _REVISION)
    with database.engine.begin() as connection:
        fill(connection, version["tables"])
    assert schema.current_revision(database) == _REVISION
    database.close()


def fill(connection: Connection, tables: dict[str, list[dict[str, Any]]]) -> None:
    metadata = MetaData()
    metadata.reflect(connection)
    for table in metadata.sorted_tables:
        rows = [unpacked(row) for row in tables[table.name]]
        connection.execute(delete(table))
        if rows:
            connection.execute(insert(table), rows)
        if connection.dialect.name == "postgresql" and rows:
            for column in table.primary_key:
                count_on(connection, table.name, column.name)


def count_on(connection: Connection, table: str, column: str) -> None:
    """A number that Postgres gives is above those that the rows brought with them."""
    of = {"table": table, "column": column}
    sequence = connection.execute(text("SELECT pg_get_serial_sequence(:table, :column)"), of).scalar_one()
    if sequence is not None:
        newest = connection.execute(text(f"SELECT max({column}) FROM {table}")).scalar_one()
        connection.execute(
            text("SELECT setval(:sequence, :newest)"), {"sequence": sequence, "newest": newest}
        )


def as_before(found: Any, before: Any) -> bool:
    """Equal, but for fields that version 0.1.0 did not have."""
    if isinstance(before, dict):
        return all(name in found and as_before(found[name], value) for name, value in before.items())
    if isinstance(before, list):
        return len(found) == len(before) and all(map(as_before, found, before))
    return bool(found == before)


@pytest.mark.promise("populated-database-version-0")
def test_a_database_of_version_0_1_0_is_upgraded_and_read_as_before(
    tmp_path: Path, database_url: str
) -> None:
    """1. It is laid out. 2. This version opens it. 3. Everything reads as then. 4. It is used on."""
    version = kept()
    lay_out(tmp_path, database_url, version)
    store = Store(tmp_path, database_url)
    try:
        assert schema.current_revision(store.database) == schema.HEAD
        found = read_all(store)
        for name, before in version["read"].items():
            assert as_before(found[name], before), f"{name}: {found[name]}, before: {before}"
        orin = store.read(device_info, DeviceId("orin"))
        pushed = store.submit_together(
            push_wanted, Push(device=orin.device, plan="whole", decided_by="operator")
        ).result(30)
        assert pushed.generation > orin.desired_generation
        assert len(store.read(generation_history, None)[0]) == len(version["read"]["history"]) + 1
    finally:
        store.close()


def test_a_backup_can_be_made_before_the_migration_and_is_of_the_old_database(tmp_path: Path) -> None:
    """1. This version is installed over 0.1.0; 2. it makes a backup; 3. that unpacks to what 0.1.0 left, its
    artifacts too, which a planner migrates as ever."""
    home, copy = tmp_path / "home", tmp_path / "copy"
    lay_out(home, "", kept())
    assert execute(["planner", "backup", str(tmp_path / "b.tar"), "--data-dir", str(home)]) == 0
    with tarfile.open(tmp_path / "b.tar") as tar:
        tar.extractall(copy, filter="data")
    database = Database(sqlite_url(copy / DATABASE_FILE))
    assert schema.current_revision(database) == _REVISION
    database.close()
    with closing(Store(copy)) as store:
        assert [len(store.graph(model.digest).operators) for model in store.read(model_infos)] != []
