"""Rollouts on both databases, from the first wave to their deletion."""

import pytest
from msgspec.structs import replace

from stageloom.planner.labels import LabelChanges
from stageloom.planner.schema.rollout import AskState, RolloutCreateRequest, RolloutState
from stageloom.planner.store.labels import change_labels
from stageloom.planner.store.plans import keep_plan
from stageloom.planner.store.rollout_turns import advance_rollout, ask_devices, fail_devices, rollout_turn
from stageloom.planner.store.rollouts import (
    abort_rollout,
    create_rollout,
    delete_old_rollouts,
    live_rollouts,
    rollout_devices,
    rollout_info,
    rollout_infos,
    undecided_devices,
)
from stageloom.planner.store.store import Store
from stageloom.shared.messages.control import DeviceState
from tests.rollout.fleet import Fleet, add_version
from tests.store.helpers import small_plan


def ask(store: Store, plan: str) -> int:
    """Ask all devices that are due; how many."""
    due = store.read(rollout_turn, "r", {}).ask
    store.write(ask_devices, "r", [(one, plan) for one in due])
    return len(due)


@pytest.mark.promise("rollout-stops-by-itself")
def test_a_rollout_goes_from_wave_to_wave_and_back(store: Store) -> None:
    """1. Of five devices three have the label. 2. The first keeps the version, of the next two one cannot be
    planned for and one rolls back, so that it stops. 3. It is rolled back, and deleted later."""
    fleet = Fleet(store.data_dir, 5, store=store)
    add_version(store, store.data_dir, "relu", "two")
    plan = store.write(keep_plan, small_plan(store), "sequential")
    for name in fleet.names[:3]:
        store.write(change_labels, name, LabelChanges({"site": "a"}, ()))
    chosen = RolloutCreateRequest(model="relu@2", label=("site=a",), waves="1,100%", max_failed=1)
    request = replace(chosen, rollout="r")
    assert store.write(create_rollout, request).devices == 3
    assert store.read(live_rollouts) == ["r"]
    assert ask(store, plan) == 1
    assert store.read(undecided_devices, "r") == {fleet.names[0]}
    fleet.report(fleet.names[:1], DeviceState.COMMITTED)
    assert store.read(rollout_turn, "r", {}).due
    store.write(advance_rollout, "r", {})
    store.write(fail_devices, "r", fleet.names[1:2], "no plan")
    assert ask(store, plan) == 1
    fleet.report(fleet.names[2:3], DeviceState.ROLLED_BACK, "slow")
    ((device, back),) = store.write(advance_rollout, "r", {}).changed
    assert (device, back.generation) == (fleet.names[2], 3)
    assert store.read(rollout_info, "r").state is RolloutState.STOPPED
    assert [(one.state, one.reason) for one in store.read(rollout_devices, "r")] == [
        (AskState.DONE, ""),
        (AskState.FAILED, "no plan"),
        (AskState.FAILED, "rolled_back: slow"),
    ]
    info, changed = store.write(abort_rollout, "r", rollback=True)
    assert (info.state, info.returned, [device for device, _ in changed]) == (
        RolloutState.ABORTED,
        1,
        fleet.names[:1],
    )
    assert {fleet.artifact(name) for name in fleet.names} == {fleet.old}
    assert len(store.read(rollout_devices, "r", after=fleet.names[0])) == 2
    later_us = info.changed_at_us + 1
    assert store.write(delete_old_rollouts, info.changed_at_us, 2) == 0
    while store.write(delete_old_rollouts, later_us, 2):
        pass
    assert store.read(rollout_infos) == []
