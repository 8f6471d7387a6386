"""A planner's data directory with devices enrolled and a plan to push.

Devices are enrolled through the store with a token each: the enrolment socket lets a few strangers a second
in, on purpose, which would take minutes here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from sqlalchemy.orm import Session

from stageloom.planner.dispatch.ports import EnrolAttempt
from stageloom.planner.store.desired import Push, push_wanted
from stageloom.planner.store.devices import add_token, enrol_device
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.store import Store
from stageloom.shared.artifact import pack_artifact
from stageloom.shared.digest import digest_bytes
from stageloom.shared.graph import Graph, Operator, Tensor
from stageloom.shared.ids import DeviceId, Digest, TensorId
from stageloom.shared.keyfile import KeyPair
from stageloom.shared.search.compose import ModelChoice, compose

PLAN = "bench"
MODEL = "relu"
_OPERATORS = 24


@dataclass(frozen=True)
class Enrolled:
    """A device that the planner knows."""

    device: DeviceId
    keys: KeyPair


def enrol(data_dir: Path, count: int) -> list[Enrolled]:
    """Make the data directory, with `count` devices, one model and one plan."""
    store = Store(data_dir)
    try:
        fleet = [Enrolled(DeviceId(f"bench-{at:04}"), _new_keys()) for at in range(count)]
        answers = [
            store.writer.submit(lambda session, one=one: _enrol(session, one))  # type: ignore[misc]
            for one in fleet
        ]
        for answer in answers:
            answer.result(60.0)
        _add_plan(store, data_dir)
        return fleet
    finally:
        store.close()


def push_behind_the_planners_back(data_dir: Path, fleet: Sequence[Enrolled]) -> int:
    """Desire the plan once more of every device, as a planner does that dies before it has told them.

    Returns the generation.
    """
    store = Store(data_dir)
    try:
        answers = [
            store.submit_together(push_wanted, Push(device=one.device, plan=PLAN, decided_by="operator"))
            for one in fleet
        ]
        return max(answer.result(60.0).generation for answer in answers)
    finally:
        store.close()


def _new_keys() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def _enrol(session: Session, one: Enrolled) -> None:
    secret = digest_bytes([one.device.encode()])
    add_token(session, secret, one.device, 3600.0)
    session.flush()
    enrol_device(session, EnrolAttempt(secret, one.keys.public, one.device, "0.1.0", "bench"))


def _add_plan(store: Store, folder: Path) -> None:
    digest, blob = pack_artifact(_chain(), b"no file: nothing here runs it")
    file = folder / "relu.artifact"
    file.write_bytes(blob)
    store.add_model(MODEL, file, digest)
    store.write(
        add_plan, PLAN, compose([ModelChoice(name=MODEL, artifact=Digest(digest), graph=_chain())]), "bench"
    )


def _chain() -> Graph:
    return Graph(
        name=MODEL,
        tensors=tuple(Tensor(f"t{at}", "float32", (1, 4)) for at in range(_OPERATORS + 1)),
        operators=tuple(
            Operator("Relu", f"relu{at}", (at,), (TensorId(at),), (TensorId(at + 1),), 4, 0, at)
            for at in range(_OPERATORS)
        ),
        inputs=(TensorId(0),),
        outputs=(TensorId(_OPERATORS),),
        base_cuts=(_OPERATORS // 2,),
        partitions=(("whole", ()), ("base", (_OPERATORS // 2,))),
    )
