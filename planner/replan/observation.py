"""What a policy sees when it is asked for plans: one frozen value."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stageloom.planner.replan.settings import ReplanSettings
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import AlarmSample
from stageloom.shared.plan import Plan
from stageloom.shared.policy.plain import Load
from stageloom.shared.search.costs import CostTable


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One device at the moment of an alarm.

    `proven`: plans that committed on this device in this environment, over the incumbent's models, newest
    first. `barred`: (plan, structure) of those that did not gain here lately.
    """

    device: DeviceId
    cause: str
    incumbent: Plan
    desired: tuple[int, int]  # (epoch, generation) that was newest at that moment
    loads: tuple[Load, ...]
    samples: tuple[AlarmSample, ...]
    graphs: Mapping[Digest, Graph]
    costs: CostTable
    proven: tuple[Plan, ...] = ()
    barred: tuple[tuple[Digest, Digest], ...] = ()
    settings: ReplanSettings = field(default_factory=ReplanSettings)
    environment: str = ""  # the device class that all of this is of
    costs_key: str = ""  # what costs and schedules are kept under: the device class, or the device's own key
    checkpoint: bytes = b""  # a trained policy, for the scheduler that takes one
    learned: bytes = b""  # one that proposes plans itself (maddpg)
    schedules: Mapping[tuple[Digest, int], tuple[str, ...]] = field(default_factory=dict)
    """Where such a policy is: stage strings that were found for combined blocks of so large a batch."""
