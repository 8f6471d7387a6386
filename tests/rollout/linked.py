"""Simulated devices on real sockets that keep or refuse versions as a test says."""

import threading
import time
from collections.abc import Collection, Sequence
from random import Random
from typing import Any, Final

import zmq

from benchmarks.control_plane.clients import SimulatedDevice, Tally
from benchmarks.control_plane.planner import Enrolled
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages import control
from stageloom.shared.token import Endpoints

_TURN_S: Final = 0.01
_BEAT_S: Final = 0.3


class JudgingDevice(SimulatedDevice):
    """Rolls plans with a bad artifact back, keeps the others, and answers nothing to those that wait."""

    bad: Collection[Digest] = ()
    held: Collection[Digest] = ()
    active: Digest | None = None
    at_s = 0.0

    def _desired(self, desired: control.Desired) -> None:
        if not {need.digest for need in desired.artifacts} & set(self.held):
            super()._desired(desired)

    def report_on(self, desired: control.Desired, revision: int) -> control.Report:
        refused = bool({need.digest for need in desired.artifacts} & set(self.bad))
        if not refused:
            self.active = desired.plan_digest
        return control.Report(
            revision=revision,
            epoch=desired.epoch,
            generation=desired.generation,
            seen=desired.plan_digest,
            active=self.active,
            origin=control.Origin.PLANNER,
            state=control.DeviceState.ROLLED_BACK if refused else control.DeviceState.COMMITTED,
            reason="p99 worsened" if refused else "",
        )


class LinkedFleet:
    """Devices on a thread of their own, from `__init__` to `close`."""

    def __init__(self, fleet: Sequence[Enrolled], planner_key: str, endpoints: Endpoints) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * len(fleet) + 64)
        self.tally = Tally()
        self.devices = {
            one.device: JudgingDevice(
                self._context, one.device, one.keys, planner_key, endpoints, self.tally, Random(at)
            )
            for at, one in enumerate(fleet)
        }
        self._stop = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def refuse(self, devices: Collection[DeviceId], artifact: Digest) -> None:
        """These devices roll plans with the artifact back from now on."""
        for device in devices:
            self.devices[device].bad = (artifact,)

    def hold(self, devices: Collection[DeviceId], artifacts: Collection[Digest]) -> None:
        """These devices answer nothing to plans with the artifacts; with none they do when told next."""
        for device in devices:
            self.devices[device].held = tuple(artifacts)

    def close(self) -> None:
        """End it; what failed on its thread fails here."""
        self._stop.set()
        self._thread.join(30)
        self._context.destroy(linger=0)
        assert not self._failed, self._failed

    def _run(self) -> None:
        try:
            while not self._stop.wait(_TURN_S):
                for device in self.devices.values():
                    self._turn(device, time.monotonic())
        except BaseException as error:
            self._failed.append(error)

    @staticmethod
    def _turn(device: JudgingDevice, now_s: float) -> None:
        if device.wants_connection(now_s):
            device.connect()
        if device.silent(now_s):
            for gone in device.disconnect(now_s):
                gone.close(linger=0)
        if not device.connected:
            return
        for lane in (0, 1):
            device.drain(lane, now_s)
        if now_s - device.at_s >= _BEAT_S:
            device.at_s = now_s
            device.beat(now_s)
            device.measure(now_s, new_rows=True)

    def seen(self) -> dict[str, Any]:
        """How many devices run which plan, by the first characters of its digest."""
        plans = [(device.active or "none")[:12] for device in self.devices.values()]
        return {plan: plans.count(plan) for plan in set(plans)}
