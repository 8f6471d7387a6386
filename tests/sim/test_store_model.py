"""The simulated planner's store is a model; here it does everything beside the real one, on a database."""

from pathlib import Path
from random import Random

import pytest

from stageloom.planner.dispatch.ports import FleetMember, ReportRecord, TelemetryWrite
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.models import named_models
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.telemetry import telemetry_balance
from stageloom.planner.telemetry import Balance, TelemetryAccount
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import ArtifactNeed, Desired, DeviceState, Origin, Report
from stageloom.shared.messages.telemetry import Ledger
from stageloom.shared.plan import Plan
from tests.link.memory_store import MemoryStore
from tests.store.helpers import add_model, enrol, key, row, small_plan
from tests.store.migrated import new_store

DEVICES = (DeviceId("one"), DeviceId("two"))
OPERATIONS = 120


class Pair:
    """Both stores, given the same orders."""

    def __init__(self, folder: Path, rng: Random) -> None:
        self.rng = rng
        self.real = new_store(folder)
        self.model = MemoryStore()
        self.plans: list[Plan] = []
        for number in range(3):
            name = f"m{number}"
            add_model(self.real, folder, name, operators=4 + number)
            self.plans.append(small_plan(self.real, name))
            self.real.write(add_plan, f"p{number}", self.plans[-1], "sequential")
        for number, device in enumerate(DEVICES, 1):
            enrol(self.real, device, number)
            self.model.members[device] = FleetMember(device, key(number), device_class="cpu-2-core")

    def step(self) -> None:
        """One random order, and what both answered."""
        device = self.rng.choice(DEVICES)
        self.rng.choice((self.push, self.push, self.reissue, self.report, self.report, self.telemetry))(
            device
        )

    def push(self, device: DeviceId) -> None:
        number = self.rng.randrange(3)
        plan = self.plans[number]
        (info,) = self.real.read(named_models, [f"m{number}"])
        wanted = Desired(
            epoch=0,
            generation=0,
            plan_digest=plan.digest,
            plan=plan.wire,
            artifacts=(ArtifactNeed(f"m{number}", info.digest, info.size_bytes),),
        )
        assert self.real.write(
            push, Push(device=device, plan=f"p{number}", decided_by="test")
        ) == self.model.push(device, wanted)

    def reissue(self, device: DeviceId) -> None:
        above = {"above_epoch": self.rng.randrange(4), "above_generation": self.rng.randrange(40)}
        assert LinkStore(self.real).reissue(device, **above) == self.model.reissue(device, **above)

    def report(self, device: DeviceId) -> None:
        record = ReportRecord(
            device,
            self.rng.randint(1, 2),
            Report(
                revision=self.rng.randrange(8),
                epoch=1,
                generation=self.rng.randrange(9),
                seen=Digest("a" * 64),
                active=self.rng.choice((None, Digest("b" * 64))),
                origin=self.rng.choice(list(Origin)),
                state=self.rng.choice(list(DeviceState)),
                reason=self.rng.choice(("", "why")),
            ),
        )
        LinkStore(self.real).record_reports([record])
        self.model.record_reports([record])

    def telemetry(self, device: DeviceId) -> None:
        """Rows of which some are there already, and books that only ever grow."""
        boot, first = self.rng.randint(1, 2), self.rng.randrange(30)
        rows = tuple(row(at, boot=boot) for at in range(first, first + self.rng.randrange(6)))
        known = self.model.books.get((device, boot), TelemetryAccount())
        ledger = Ledger(boot, known.produced + self.rng.randrange(3), known.dropped + self.rng.randrange(2))
        write = TelemetryWrite(device, rows, (ledger,) if self.rng.random() < 0.7 else ())
        LinkStore(self.real).append_telemetry([write])
        self.model.append_telemetry([write])

    def check(self) -> None:
        """They hold the same."""
        assert LinkStore(self.real).epoch() == self.model.epoch()
        assert list(LinkStore(self.real).fleet()) == list(self.model.fleet())
        for device in DEVICES:
            books = [one for (name, _), one in self.model.books.items() if name == device]
            stored = sum(1 for name, _, _ in self.model.rows if name == device)
            assert stored == sum(one.stored for one in books)
            assert self.real.read(telemetry_balance, device) == Balance(
                sum(one.produced for one in books),
                stored,
                sum(one.dropped for one in books),
                sum(one.lost for one in books),
            )


@pytest.mark.parametrize("seed", range(3))
def test_the_model_of_the_store_is_equal_to_the_store_on_a_database(tmp_path: Path, seed: int) -> None:
    pair = Pair(tmp_path, Random(seed))
    try:
        for _ in range(OPERATIONS):
            pair.step()
            pair.check()
    finally:
        pair.real.close()
