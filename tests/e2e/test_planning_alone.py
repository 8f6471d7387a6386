"""The planner is killed: the agent re-plans alone with its learned policy, and the return reconciles."""

import signal
from pathlib import Path

import pytest

from stageloom import Client
from stageloom.edge_agent.lifecycle.statefile import load_state
from stageloom.edge_agent.link.factory import STATE_NAME
from stageloom.edge_agent.machine.device import device_class
from stageloom.planner.store.policies import store_policy
from stageloom.planner.store.store import ReadStore
from stageloom.shared.engine.interval_guard import GuardConfig
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.policy.maddpg.actions import actions_of
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, encode
from stageloom.shared.policy.maddpg.space import Space
from tests.e2e.fleet import Device, Fleet
from tests.e2e.networks import rows
from tests.policy.maddpg.cases import saying

INTERVAL_S = 0.2


def running_plan(device: Device) -> Plan:
    """What the device believes in."""
    good = load_state(device.home / STATE_NAME)[0].last_good
    assert good is not None
    return decode_plan(good.wire, good.ref.digest)


def keep_policy(plan: Plan, home: Path) -> Digest:
    """Kept as by a training: it leaves the blocks alone and launches as often as the device can."""
    space = Space.of(plan, device_class())
    alone = actions_of(space, [(member,) for member in space.members])
    launcher = (0.001,) * space.num_models
    body = encode(MaddpgCheckpoint(space, saying(space, (*launcher, *alone))))
    provenance = {"models": {}, "settings": {}, "versions": {}, "validation_ratio": 1.0, "steps": 1}
    store = ReadStore.open(home)
    try:
        return store.database.change(
            store_policy,
            body,
            policy="maddpg",
            device_class=space.device_class,
            provenance=provenance,
            curves=(),
            trained_at_us=1,
            unchecked=True,
        )
    finally:
        store.close()


@pytest.mark.promise("planner-killed-agent-re")
@pytest.mark.more
def test_with_the_planner_killed_the_agent_re_plans_with_its_policy_and_the_planner_adopts_it(
    device: Device, fleet: Fleet
) -> None:
    """1. A device that may re-plan by itself runs a plan whose launch intervals are far too long.
    2. A policy is attached: the device fetches it, without another trial of what it runs.
    3. The planner is killed, and the agent restarts; a burst comes. It runs the plan of its policy, and
       says so.
    4. The planner comes back on the same data and adopts that plan as the next generation.
    """
    slow = f"interval={INTERVAL_S},strict=yes"
    models = ("--model", f"alpha:{slow}", "--model", f"beta:{slow}", "--scheduler", "sequential")
    pushed = fleet.make_plan("paced", *models)
    guard = GuardConfig(length_s=1.0, min_tasks=10)
    device.start()
    fleet.do("plan", "push", device.name, "paced", "--now", "--autonomy", "full")
    device.until_seen(lambda seen: seen["report"]["state"] == "committed", "the plan to be committed")
    policy = keep_policy(running_plan(device), fleet.home)
    assert fleet.ask("policy", "attach", device.name, policy[:12])["generation"] == 2
    device.running.until(lambda s: s.policy is not None and s.policy.digest == policy, "the policy is read")
    device.until_seen(lambda seen: seen["report"]["generation"] == 2, "the device to have the generation")
    assert device.seen()["report"]["state"] == "committed"
    fleet.end(signal.SIGKILL)
    device.running.stop()
    agent = device.start(guard=guard)
    found = agent.until(lambda s: s.ready and s.policy is not None, "the policy is read again")
    assert found.policy is not None and (found.policy.digest, found.policy.refused) == (policy, "")
    assert found.plan is not None and found.plan.digest == pushed
    with Client(agent.socket) as client:
        futures = [client.submit("alpha", {"input": rows(1)[0]}) for _ in range(60)]
        found = agent.until(lambda s: s.plan is not None and s.plan.origin == "local", "it re-plans")
        for future in futures:
            future.result(60)
    assert found.plan is not None
    assert any("policy_plan" in one and found.plan.digest[:12] in one for one in agent.now().problems)

    replanned = found.plan.digest
    agent.until(lambda _: running_plan(device).digest == replanned, "it is last-known-good")
    made = running_plan(device)
    assert made.digest != pushed and made.models[0].launch_interval_us < INTERVAL_S * 1e6 / 10

    fleet.start()
    # The planner may go on from there, for an alarm of the burst, before anyone has looked.
    seen = device.until_seen(lambda seen: seen["report"]["generation"] >= 3, "the local plan to be adopted")
    adopted = next(one for one in seen["history"] if one["generation"] == 3)
    assert (adopted["decided_by"], adopted["digest"]) == ("local", made.digest)
    assert seen["report"]["origin"] == "planner"
