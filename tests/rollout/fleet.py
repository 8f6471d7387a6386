"""A store with two versions of a model and devices that run the first, and the planner's side of a link."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from stageloom.planner.api.context import FleetLink
from stageloom.planner.dispatch.ports import ReportRecord
from stageloom.planner.store.desired import Push, desired, push_all
from stageloom.planner.store.devices import store_reports
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.store import Store
from stageloom.shared.artifact import pack_artifact
from stageloom.shared.clock import ManualClock
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Desired, DeviceState, Report
from stageloom.shared.plan import decode_plan
from stageloom.shared.token import JoinToken
from tests.store.helpers import chain, enrol, small_plan
from tests.store.migrated import new_store


def add_version(store: Store, folder: Path, name: str, weights: str, operators: int = 4) -> Digest:
    """A further version of a model: other weights, or another graph."""
    digest, blob = pack_artifact(chain(name, operators), weights.encode())
    path = folder / f"{name}-{weights}.artifact"
    path.write_bytes(blob)
    store.add_model(name, path, digest)
    return digest


class Fleet(FleetLink):
    """Devices `d00`, `d01`... that run version 1 of `relu`; tests say who is online and what they decide."""

    def __init__(self, home: Path, devices: int, *, store: Store | None = None) -> None:
        self.clock = ManualClock()
        self.store = store or new_store(home, clock=self.clock)
        self.names = [DeviceId(f"d{number:02}") for number in range(devices)]
        self.up = set(self.names)
        self.told: list[tuple[DeviceId, int]] = []
        self._revision = 1
        self.old = add_version(self.store, home, "relu", "one")
        for number, name in enumerate(self.names, 1):
            enrol(self.store, name, number)
        self.store.write(add_plan, "first", small_plan(self.store), "sequential")
        pushes = [Push(device=name, plan="first", decided_by="operator") for name in self.names]
        self.store.write(push_all, pushes)
        self.report(self.names, DeviceState.COMMITTED)

    def wanted(self, device: DeviceId) -> Desired:
        """What is desired of a device."""
        found = self.store.read(desired, device)
        assert found is not None
        return found

    def artifact(self, device: DeviceId) -> Digest:
        """The version of `relu` that a device should run."""
        return decode_plan(self.wanted(device).plan).models[0].artifact

    def report(
        self,
        devices: Iterable[DeviceId],
        state: DeviceState,
        reason: str = "",
        *,
        active: Digest | None = None,
    ) -> None:
        """Devices say how far they are with what is desired of them, and what runs."""
        self._revision += 1
        records = [
            ReportRecord(
                device=device,
                boot=1,
                report=Report(
                    revision=self._revision,
                    epoch=self.wanted(device).epoch,
                    generation=self.wanted(device).generation,
                    active=active,
                    state=state,
                    reason=reason,
                ),
                device_class="cpu-2-core",
                agent_version="0.1.0",
            )
            for device in devices
        ]
        self.store.write(store_reports, records)

    def online(self) -> frozenset[DeviceId]:
        return frozenset(self.up)

    def desired_changed(self, device: DeviceId, desired: Desired) -> None:
        self.told.append((device, desired.generation))

    def desired_in_doubt(self, devices: Sequence[DeviceId]) -> None:
        pass

    def revoked(self, device: DeviceId) -> None:
        pass

    def released(self, device: DeviceId) -> None:
        pass

    def backlog_rows(self) -> int:
        return 0

    def telemetry_failures(self) -> tuple[int, int]:
        return 0, 0

    def token(self, secret: bytes) -> JoinToken:
        raise NotImplementedError
