"""A backup is made while the planner writes, unpacks to a working planner, and the books say what it lost."""

import json
import shutil
import stat
import tarfile
from pathlib import Path

import pytest

from stageloom.edge_agent.link.spool import Spool
from stageloom.planner.dispatch.ports import telemetry_write
from stageloom.planner.service import KEY_FILE
from stageloom.planner.store.backup import backup
from stageloom.planner.store.events import newest_events
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.models import Blobs
from stageloom.planner.store.plans import add_plan, plan_info
from stageloom.planner.store.schema import HEAD
from stageloom.planner.store.store import ReadStore, Store
from stageloom.planner.store.telemetry import telemetry_balance, telemetry_rows
from stageloom.planner.store.used_database import ARTIFACT_FOLDER, DATABASE_FILE
from stageloom.planner.telemetry import Balance
from stageloom.shared.errors import InputError, StorageError
from stageloom.shared.ids import Digest
from stageloom.shared.messages.telemetry import QueueSample, Row, RowKind, TelemetryAck, encode_row
from tests.planner.processes import ok, stageloom
from tests.store.helpers import NANO, T0_US, add_model, enrol, small_plan, start, write_of
from tests.store.migrated import new_store

BOOT = 9


def restore(archive: Path, folder: Path) -> Path:
    """As the documentation says: unpack into an empty directory."""
    folder.mkdir()
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder


class Agent:
    """A device's real spool, which talks to a store as the link would."""

    def __init__(self, folder: Path) -> None:
        self.spool = Spool(folder, boot=BOOT, limit_bytes=1 << 20)
        self.rows = 0

    def measure(self, count: int) -> None:
        samples = [QueueSample("m", self.rows + index, 1, 1) for index in range(count)]
        self.spool.append([encode_row(Row(T0_US + sample.tasks, sample)) for sample in samples])
        self.rows += count

    def upload(self, store: Store) -> None:
        while (batch := self.spool.next_batch(1)) is not None:
            LinkStore(store).append_telemetry([telemetry_write(NANO, batch)])
            self.spool.acknowledge(TelemetryAck(ranges=batch.ranges, ledgers=batch.ledgers))


@pytest.mark.promise("produced-stored-dropped-spooled")
def test_after_a_restoration_produced_is_stored_and_dropped_and_lost_and_spooled(tmp_path: Path) -> None:
    """1. a device uploads 100 rows, and the running planner is backed up; 2. it uploads 50 more, which are
    acknowledged and forgotten; 3. the planner's disk dies, and the backup is restored; 4. the device drops
    some rows, uploads others and still spools some: every row it ever produced is accounted for, the 50 as
    lost, and the operator is told."""
    home, agent = tmp_path / "home", Agent(tmp_path / "spool")
    home.mkdir()
    store = new_store(home)
    enrol(store)
    agent.measure(100)
    agent.upload(store)
    backup(home, "", tmp_path / "backup.tar", (KEY_FILE,))
    agent.measure(50)
    agent.upload(store)
    assert store.read(telemetry_balance, NANO) == Balance(150, 150, 0, 0)
    store.close()
    shutil.rmtree(home)

    restored = Store(restore(tmp_path / "backup.tar", tmp_path / "restored"))
    assert restored.read(telemetry_balance, NANO) == Balance(100, 100, 0, 0)
    agent.measure(40_000)
    agent.upload(restored)
    agent.measure(7)
    books, spool = restored.read(telemetry_balance, NANO), agent.spool.counts()
    assert (books.lost, spool.spooled) == (50, 7) and books.dropped > 0
    assert agent.rows == books.stored + books.dropped + books.lost + spool.spooled
    assert _samples(restored).isdisjoint(range(100, 150)) and len(_samples(restored)) == books.stored
    told = [
        text
        for _, device, code, text in restored.read(newest_events)
        if (device, code) == (NANO, "telemetry_lost")
    ]
    assert told == [f"50 telemetry rows of boot {BOOT:016x} were acknowledged and are not in this database: "
                    "it was restored from an older copy"]  # fmt: skip
    restored.close()


def _samples(store: Store) -> set[int]:
    """The numbers of the stored rows: each sample's queue length is its row's."""
    rows = store.read(telemetry_rows, NANO, [RowKind.QUEUE_SAMPLE], limit=10**6)
    return {row.data.tasks for row in rows if isinstance(row.data, QueueSample)}


@pytest.mark.promise("backup-planner-work-restores")
def test_a_backup_of_a_planner_that_writes_is_as_of_one_moment(tmp_path: Path) -> None:
    """Several backups while another process stores batches of 20 rows: each restores, no batch is in it by
    half, its books balance, and a later one has at least what an earlier one has."""
    home = tmp_path / "home"
    home.mkdir()
    store = new_store(home)
    enrol(store)
    digest = add_model(store, tmp_path)
    store.write(add_plan, "first", small_plan(store), "sequential")
    code = """
import itertools, sys
from pathlib import Path
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.schema import HEAD
from stageloom.planner.store.store import Store
from tests.store.helpers import write_of
store = Store(Path(sys.argv[1]))
for first in itertools.count(0, 20):
    LinkStore(store).append_telemetry([write_of(first, first + 19)])
    print(first + 19, flush=True)
"""
    child = start(code, str(home))
    try:
        assert child.stdout is not None
        stored = [0]
        for number in range(3):
            acknowledged = int(child.stdout.readline())
            target = tmp_path / f"{number}.tar"
            backup(home, "", target, (KEY_FILE,))
            copy = ReadStore.open(restore(target, tmp_path / f"restored-{number}"))
            books = copy.read(telemetry_balance, NANO)
            assert books == Balance(books.stored, books.stored, 0, 0) and books.stored % 20 == 0
            assert len(copy.read(telemetry_rows, NANO, [RowKind.QUEUE_SAMPLE], limit=10**6)) == books.stored
            assert books.stored > acknowledged and books.stored >= stored[-1]
            stored.append(books.stored)
            assert copy.load_artifact(digest).onnx_bytes() == b"relu"
            assert copy.read(plan_info, "first").models == ("relu",)
            copy.close()
    finally:
        child.kill()
        child.communicate()
    store.close()


def test_a_backup_is_secret_complete_and_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    store = new_store(tmp_path / "home")
    digest = add_model(store, tmp_path)
    (tmp_path / "home" / KEY_FILE).write_bytes(b"keys")
    (tmp_path / "home" / ARTIFACT_FOLDER / "ab").mkdir(exist_ok=True)
    (tmp_path / "home" / ARTIFACT_FOLDER / "ab" / "nobody-names-this").write_bytes(b"x")
    assert json.loads(ok(tmp_path / "home", "migrate", "--json")) == {"before": HEAD, "after": HEAD}
    said = json.loads(ok(tmp_path / "home", "planner", "backup", str(tmp_path / "b.tar"), "--json"))
    assert said == {"file": str(tmp_path / "b.tar"), "size_bytes": (tmp_path / "b.tar").stat().st_size}
    assert stat.S_IMODE((tmp_path / "b.tar").stat().st_mode) == 0o600
    with tarfile.open(tmp_path / "b.tar") as tar:
        names = sorted(tar.getnames())
    assert names == [f"{ARTIFACT_FOLDER}/{digest[:2]}/{digest}", KEY_FILE, DATABASE_FILE]
    again = stageloom(tmp_path / "home", "planner", "backup", str(tmp_path / "b.tar"))
    assert again.returncode == 2 and "exists; choose another name" in again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tar", "home", "relu.artifact"]
    store.close()


def test_a_model_that_goes_away_meanwhile_is_no_hole_in_the_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. the database is copied; 2. the operator removes a model before its file is; 3. the backup starts
    over, and is of a moment without the model."""
    store = new_store(tmp_path)
    add_model(store, tmp_path)
    asked: list[Digest] = []
    path_of = Blobs.path

    def removed_first(self: Blobs, digest: Digest) -> Path:
        if self is not store.blobs and not asked:
            asked.append(digest)
            store.remove_model("relu")
        return path_of(self, digest)

    monkeypatch.setattr(Blobs, "path", removed_first)
    backup(tmp_path, "", tmp_path / "b.tar", ())
    with tarfile.open(tmp_path / "b.tar") as tar:
        assert (tar.getnames(), len(asked)) == ([DATABASE_FILE], 1)
    store.close()


def test_no_planner_and_no_folder_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no planner data"):
        backup(tmp_path, "", tmp_path / "b.tar", ())
    store = new_store(tmp_path)
    with pytest.raises(StorageError, match=r"there is no directory .*absent for the backup; make it first"):
        backup(tmp_path, "", tmp_path / "absent" / "b.tar", ())
    store.close()


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_database_on_a_server_is_left_to_its_own_tools(tmp_path: Path, database_url: str) -> None:
    store = Store(tmp_path, database_url)
    with pytest.raises(InputError, match=r"not part of this backup; use pg_dump, then copy .*planner.keys"):
        backup(tmp_path, database_url, tmp_path / "b.tar", (KEY_FILE,))
    store.close()


def test_a_copy_of_a_stopped_planners_file_is_a_backup_too(tmp_path: Path) -> None:
    """The plain way: stop, copy the file, start; what was acknowledged after the copy is counted as lost."""
    (tmp_path / "home").mkdir()
    store = new_store(tmp_path / "home")
    enrol(store)
    LinkStore(store).append_telemetry([write_of(0, 9)])
    store.close()
    shutil.copy(tmp_path / "home" / DATABASE_FILE, tmp_path / "copy")
    store = new_store(tmp_path / "home")
    LinkStore(store).append_telemetry([write_of(10, 19)])
    store.close()
    shutil.copy(tmp_path / "copy", tmp_path / "home" / DATABASE_FILE)
    store = new_store(tmp_path / "home")
    LinkStore(store).append_telemetry([write_of(20, 24)])
    assert store.read(telemetry_balance, NANO) == Balance(25, 15, 0, 10)
    LinkStore(store).append_telemetry(
        [write_of(10, 19)]
    )  # they cannot come back, or books would change for ever
    assert store.read(telemetry_balance, NANO) == Balance(25, 15, 0, 10)
    store.close()
