"""The planner is killed: the agent re-plans alone with its learned policy, and the return reconciles."""

import signal
from pathlib import Path

from edge_agent import Client
from edge_agent.device import device_class
from edge_agent.link.statefile import load_state
from edge_agent.planner_link import STATE_NAME
from edge_agent.trial_settings import GuardSettings
from shared.plan import Plan, decode_plan
from shared.policy.maddpg.checkpoint import Checkpoint, encode
from shared.policy.maddpg.combining import actions_of
from shared.policy.maddpg.space import Space
from tests.e2e.fleet import Device, Fleet
from tests.e2e.networks import rows
from tests.policy.maddpg.cases import saying

INTERVAL_S = 0.2


def running_plan(device: Device) -> Plan:
    """What the device believes in."""
    good = load_state(device.home / STATE_NAME)[0].last_good
    assert good is not None
    return decode_plan(good.wire, good.ref.digest)


def policy_for(plan: Plan, path: Path) -> str:
    """A policy that leaves the blocks alone and launches as often as the device can."""
    space = Space.of(plan, device_class())
    alone = actions_of(space, [(member,) for member in space.members])
    launcher = (0.001,) * space.num_models
    path.write_bytes(encode(Checkpoint(space, saying(space, (*launcher, *alone)))))
    return str(path)


def test_with_the_planner_killed_the_agent_re_plans_with_its_policy_and_the_planner_adopts_it(
    device: Device, fleet: Fleet
) -> None:
    """1. A device that may re-plan by itself runs a plan whose launch intervals are far too long.
    2. The planner is killed; a burst comes. The agent runs the plan of its policy, and says so.
    3. The planner comes back on the same data and adopts that plan as the next generation.
    """
    slow = f"interval={INTERVAL_S},strict=yes"
    models = ("--model", f"alpha:{slow}", "--model", f"beta:{slow}", "--scheduler", "sequential")
    pushed = fleet.make_plan("paced", *models)
    device.start()
    fleet.do("plan", "push", device.name, "paced", "--now", "--autonomy", "full")
    device.until_seen(lambda seen: seen["report"]["state"] == "committed", "the plan to be committed")
    policy = policy_for(running_plan(device), device.home / "policy")
    device.running.stop()

    guard = GuardSettings(length_s=1.0, min_tasks=10)
    agent = device.start(policy=policy, guard=guard)
    agent.until(lambda s: s.ready and s.policy is not None and not s.policy.refused, "the policy is read")
    device.until_seen(lambda seen: seen["online"] and seen["report"]["active"] == pushed, "it is back")
    fleet.end(signal.SIGKILL)
    agent.until(lambda s: s.link.state != "connected", "the loss is noticed")
    with Client(agent.socket) as client:
        futures = [client.submit("alpha", {"input": rows(1)[0]}) for _ in range(60)]
        found = agent.until(lambda s: s.plan is not None and s.plan.origin == "local", "it re-plans")
        for future in futures:
            future.result(60)
    assert found.plan is not None
    assert any("policy_plan" in one and found.plan.digest[:12] in one for one in agent.now().problems)

    fleet.start()
    seen = device.until_seen(
        lambda seen: seen["online"] and seen["report"]["generation"] == 2, "the local plan to be adopted"
    )
    made = running_plan(device)
    assert seen["report"]["active"] == made.digest == found.plan.digest != pushed
    assert seen["report"]["origin"] == "planner" and seen["report"]["state"] == "committed"
    assert made.models[0].launch_interval_us < INTERVAL_S * 1e6 / 10
