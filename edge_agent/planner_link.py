"""Which link an agent gets: to its planner, or none."""

import secrets

from edge_agent import __version__
from edge_agent.config import AgentConfig
from edge_agent.device import device_class
from edge_agent.link.core import LinkConfig, LinkCore
from edge_agent.links import Link
from edge_agent.offline_link import OfflineLink, load_link_state
from edge_agent.service import LinkFactory
from edge_agent.store import ArtifactStore, StateFile
from shared.errors import SettingError


def connect_planner(config: AgentConfig) -> LinkFactory:
    """How to make the link of an agent that serves what a planner desires.

    Raises:
        SettingError: it has joined no planner and has nothing to serve.
    """
    home = config.home_path
    file = StateFile(home / "link")
    state, problem = load_link_state(file)
    if state.last_good is None and state.desired is None and not problem:
        raise SettingError(
            "this agent has joined no planner and has no model to serve",
            remedy="run `stageloom-agent join TOKEN`, or give models with `run --model FILE`",
        )

    def offline() -> Link:
        environment = device_class()
        core = LinkCore(
            state,
            config=LinkConfig(
                boot=secrets.randbits(62) | 1, agent_version=__version__, device_class=environment
            ),
        )
        return OfflineLink(
            core,
            file,
            environment=environment,
            present=ArtifactStore(home / "artifacts").present(),
            why=problem or "run `stageloom-agent join TOKEN` to join a planner",
        )

    return offline


def join_planner(config: AgentConfig, token: str, name: str | None) -> str:
    raise NotImplementedError
