"""An agent that serves a plan from a file: what `stageloom-agent run` is, for plans that nobody pushed.

`python -m stageloom.edge_agent.bench.plan_agent SETTINGS PLAN`: settings as JSON, the plan's bytes in a file.
The plan's artifacts lie in the agent's home.
"""

import logging
import os
import sys
from pathlib import Path

from stageloom.edge_agent.config import AgentConfig, decode_config
from stageloom.edge_agent.lifecycle.shell import alone
from stageloom.edge_agent.lifecycle.states import PlanRef, RunnablePlan
from stageloom.edge_agent.run import SWITCH_INTERVAL_S, run_agent
from stageloom.edge_agent.store import ArtifactStore
from stageloom.shared.errors import StageloomError
from stageloom.shared.messages.control import ArtifactNeed, Origin
from stageloom.shared.plan import decode_plan


def main() -> int:
    os.umask(0o077)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        config = decode_config(sys.argv[1])
        logging.basicConfig(level=config.log_level, stream=sys.stderr)
        plan = runnable(config, Path(sys.argv[2]).read_bytes())
        return run_agent(config, lambda plans: (alone(plan, plans), ()))
    except StageloomError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def runnable(config: AgentConfig, wire: bytes) -> RunnablePlan:
    """The plan as an agent of its own runs it.

    Raises:
        PlanError: the bytes are no plan.
    """
    plan = decode_plan(wire)
    store = ArtifactStore(config.home_path / "artifacts")
    needs = tuple(
        ArtifactNeed(model.name, model.artifact, store.path(model.artifact).stat().st_size)
        for model in plan.models
    )
    return RunnablePlan(PlanRef(plan.digest, Origin.LOCAL, 1), wire, needs)


if __name__ == "__main__":
    sys.exit(main())
