"""Rivals' plans as action rows: what the replay is seeded with, and where the actors may start.

An untrained policy meets nothing but noise; these show the critics what whole classes of plans are worth.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from stageloom.shared.plan import Member
from stageloom.shared.policy.maddpg.combining import actions_of
from stageloom.shared.policy.maddpg.space import Space

Rows = list[tuple[Member, ...]]


@dataclass(frozen=True, slots=True)
class Seed:
    """One plan by what it does."""

    name: str
    actions: tuple[float, ...]  # an action row [action_width]


def seeds(space: Space) -> tuple[Seed, ...]:
    """Every way to combine below with tasks launched as fast as can be, and as they arrive.

    - alone: every block by itself (sequential);
    - aligned: the i-th blocks of different models (POS; IOS's joint graphs);
    - abreast: blocks as far through their models as each other, as many as H allows (all together);
    - pipelined: neighbouring blocks of one model (its tasks in flight run side by side);
    - replicas: one block of all replicas of a model (TOP's self-acceleration).
    """
    ways: dict[str, Rows] = {
        "alone": [(member,) for member in space.members],
        "aligned": _aligned(space),
        "abreast": _abreast(space),
        "pipelined": _pipelined(space),
        "replicas": _replicas(space),
    }
    found: dict[tuple[float, ...], Seed] = {}
    for (name, rows), (pace, launch) in product(ways.items(), (("fast", 0.0), ("paced", 1.0))):
        actions = (launch,) * space.num_models + actions_of(space, rows)
        found.setdefault(actions, Seed(f"{name}, {pace}", actions))
    return tuple(found.values())


def _aligned(space: Space) -> Rows:
    rows: dict[tuple[int, int], list[Member]] = {}
    for member in space.members:
        rows.setdefault((member.block, member.replica), []).append(member)
    return _parts(space, rows.values())


def _abreast(space: Space) -> Rows:
    order = sorted(range(space.bins), key=space.bin_of_start.__getitem__)
    return _parts(space, [[space.members[at] for at in order]])


def _pipelined(space: Space) -> Rows:
    rows: dict[tuple[int, int], list[Member]] = {}
    for member in space.members:
        rows.setdefault((member.model, member.replica), []).append(member)
    return _parts(space, rows.values())


def _replicas(space: Space) -> Rows:
    rows: dict[tuple[int, int], list[Member]] = {}
    for member in space.members:
        rows.setdefault((member.model, member.block), []).append(member)
    return _parts(space, rows.values())


def _parts(space: Space, rows: Iterable[list[Member]]) -> Rows:
    most = space.members_max
    return [tuple(sorted(row[at : at + most])) for row in rows for at in range(0, len(row), most)]
