"""Many pushes: together or each by itself they come to the same, in few statements."""

import threading
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from stageloom.planner.store.desired import Push, push, push_all, push_fleet, push_wanted
from stageloom.planner.store.devices import device_infos, revoke_device
from stageloom.planner.store.generations import generation_history
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import DeviceRow
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Activation, Autonomy, Desired
from tests.store.helpers import add_model, key, small_plan

FLEET = [DeviceId(f"device-{at:03}") for at in range(300)]


def fleet_of(store: Store, folder: Path, count: int) -> list[DeviceId]:
    """Enrolled devices, a model and the plans `first` and `second` of it."""
    with store.database.write() as session:
        session.add_all(
            DeviceRow(
                name=device,
                public_key=key(at),
                revoked=False,
                device_class="cpu",
                agent_version="0.1.0",
                enrolled_at_us=at,
                last_seen_us=0,
            )
            for at, device in enumerate(FLEET[:count])
        )
    for name in ("first", "second"):
        add_model(store, folder, name)
        store.write(add_plan, name, small_plan(store, name), "sequential")
    return FLEET[:count]


def pushes_of(devices: list[DeviceId], plan: str | None = "first") -> list[Push]:
    return [Push(device=device, plan=plan, decided_by="operator") for device in devices]


@pytest.mark.promise("push-many-devices-takes")
def test_a_push_to_many_takes_as_many_statements_as_one(store: Store, tmp_path: Path) -> None:
    devices = fleet_of(store, tmp_path, 64)
    with store.database.write() as session:
        push_all(session, pushes_of(devices))
    counted: list[int] = []
    for some in (devices[:1], devices):
        statements: list[str] = []
        listener = ("before_cursor_execute", lambda *given, into=statements: into.append(given[2]))
        event.listen(store.database.engine, *listener)
        with store.database.write() as session:
            push_all(session, pushes_of(some))
        event.remove(store.database.engine, *listener)
        counted.append(len(statements))
    assert counted[0] == counted[1] <= 9 + 1, "nine, and BEGIN on SQLite"


def test_more_pushes_than_fit_a_statement_are_each_made(store: Store, tmp_path: Path) -> None:
    devices = fleet_of(store, tmp_path, len(FLEET))
    with store.database.write() as session:
        results = push_all(session, pushes_of(devices))
    assert all(isinstance(one, Desired) and one.generation == 1 for one in results)
    assert {one.device: one.desired for one in LinkStore(store).fleet()} == dict(
        zip(devices, results, strict=True)
    )
    assert len(store.read(generation_history, None, limit=1000)[0]) == len(FLEET)


@pytest.mark.promise("push-many-devices-takes")
def test_of_many_pushes_only_those_that_may_not_be_are_refused(store: Store, tmp_path: Path) -> None:
    one, two, three = fleet_of(store, tmp_path, 3)
    store.write(revoke_device, two)
    wanted = [
        Push(device=one, plan="first", decided_by="operator"),
        Push(device=two, plan="first", decided_by="operator"),
        Push(device=DeviceId("ghost"), plan="first", decided_by="operator"),
        Push(device=three, plan="third", decided_by="operator"),
    ]
    with store.database.write() as session:
        made, *refused = push_all(session, wanted)
    assert isinstance(made, Desired) and made.generation == 1
    assert ["revoked" in str(refused[0]), "no device" in str(refused[1]), "no plan" in str(refused[2])] == [
        True
    ] * 3
    assert [entry.device for entry in store.read(generation_history, None)[0]] == [one]


def test_two_pushes_to_one_device_in_one_group_are_two_generations(store: Store, tmp_path: Path) -> None:
    (device,) = fleet_of(store, tmp_path, 1)
    now = Push(
        device=device,
        plan="second",
        decided_by="operator",
        autonomy=Autonomy.FULL,
        activation=Activation.NOW,
    )
    with store.database.write() as session:
        earlier, later = push_all(session, [*pushes_of([device]), now])
    assert isinstance(earlier, Desired) and isinstance(later, Desired)
    assert (earlier.generation, earlier.activation, earlier.autonomy) == (1, Activation.TRIAL, Autonomy.OFF)
    assert (later.generation, later.activation, later.autonomy) == (2, Activation.NOW, Autonomy.FULL)
    assert LinkStore(store).fleet()[0].desired == later
    assert [(one.plan, one.generation) for one in store.read(generation_history, device)[0]] == [
        ("second", 2),
        ("first", 1),
    ]


def test_a_push_without_a_plan_keeps_plan_autonomy_and_activation(store: Store, tmp_path: Path) -> None:
    (device,) = fleet_of(store, tmp_path, 1)
    before = store.write(
        push,
        Push(
            device=device,
            plan="first",
            decided_by="operator",
            autonomy=Autonomy.PROVEN,
            activation=Activation.NOW,
        ),
    )
    with store.database.write() as session:
        (after,) = push_all(session, pushes_of([device], None))
    assert isinstance(after, Desired) and after.generation == 2
    assert (after.plan, after.autonomy, after.activation) == (
        before.plan,
        Autonomy.PROVEN,
        Activation.NOW,
    )


@pytest.mark.promise("push-many-devices-takes")
def test_pushes_that_wait_together_share_a_commit_and_each_is_answered(store: Store, tmp_path: Path) -> None:
    """The writer is held while pushes queue up, one of which cannot be."""
    devices = fleet_of(store, tmp_path, 20)
    held, go, commits = threading.Event(), threading.Event(), list[int]()
    event.listen(store.database.engine, "commit", lambda _connection: commits.append(1))

    def hold(session: Session) -> None:
        held.set()
        assert go.wait(30)

    first = store.writer.submit(hold)
    assert held.wait(30)
    before = len(commits)
    waiting = [store.submit_together(push_wanted, one) for one in pushes_of([*devices, DeviceId("ghost")])]
    go.set()
    first.result(30)
    assert [future.result(30).generation for future in waiting[:-1]] == [1] * 20
    with pytest.raises(InputError, match="no device 'ghost'"):
        waiting[-1].result(30)
    assert len(commits) - before == 1


def test_a_push_to_all_leaves_revoked_devices_out_and_goes_on_after_a_name(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = fleet_of(store, tmp_path, 5)
    store.write(revoke_device, devices[1])
    monkeypatch.setattr("stageloom.planner.store.desired.MAX_PUSHED", 2)
    seen: list[DeviceId] = []
    more, after = True, ""
    while more:
        pushed, more = store.submit(push_fleet, [], "first", decided_by="operator", after=after).result(30)
        seen += [device for device, _ in pushed]
        after = seen[-1]
    assert seen == [devices[0], *devices[2:]]
    assert [one.desired_generation for one in store.read(device_infos)] == [1, 0, 1, 1, 1]
    with pytest.raises(InputError, match="no plan 'third'"):
        store.submit(push_fleet, [], "third", decided_by="operator").result(30)


def test_a_push_to_named_devices_says_which_were_refused(store: Store, tmp_path: Path) -> None:
    (device,) = fleet_of(store, tmp_path, 1)
    pushed, more = store.submit(
        push_fleet, [device, DeviceId("ghost"), device], "first", decided_by="operator"
    ).result(30)
    results = dict(pushed)
    assert not more and len(pushed) == 2, "a name given twice counts once"
    assert isinstance(results[device], Desired) and isinstance(results[DeviceId("ghost")], InputError)
