"""Settings of the link core."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """Who this agent is, and its pace until the planner says otherwise."""

    boot: int
    agent_version: str = ""
    hello_again_s: float = 2.0
    silent_after_s: float = 4.0
    fetch_again_s: float = 2.0
    storage_again_s: float = 5.0
    refused_again_s: float = 60.0
    alarm_again_s: float = 1.0
    local_wait_s: float = 5.0  # how long a connected planner has to answer an alarm before a local plan does
    local_again_s: float = 5.0
    wall_s: float = 0.0  # the wall clock less the monotonic one
