"""Models and plans that simulated devices run: real artifacts, real plans, and how each plan behaves."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import Random

from stageloom.shared.artifact import pack_artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.digest import digest_bytes
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import ArtifactNeed
from stageloom.shared.plan import Wait
from tests.engine.generate import Library, random_graph, random_plan

MODELS = 3
PLANS = 14
FEW = 4  # plans of some of the models only


@dataclass(frozen=True)
class Nature:
    """How a plan behaves on every device of one world."""

    legal: bool = True
    loads: bool = True
    crashes_loading: bool = False
    hangs_loading: bool = False
    crashes_after_s: float | None = None
    fails_tasks: bool = False
    speed: float = 1.0  # of its steps: a trial finds out

    @cached_property
    def sound(self) -> bool:
        """It loads, runs and answers."""
        return self == Nature(speed=self.speed)


SOUND = Nature()
BAD = (
    Nature(legal=False),
    Nature(loads=False),
    Nature(crashes_loading=True),
    Nature(hangs_loading=True),
    Nature(crashes_after_s=0.1),
    Nature(crashes_after_s=1.0),
    Nature(fails_tasks=True),
)


@dataclass(frozen=True)
class KnownPlan:
    """A plan as the planner pushes it; `bound` None: it does not even decode."""

    digest: Digest
    wire: bytes
    needs: tuple[ArtifactNeed, ...]
    bound: BoundPlan | None = None


@dataclass(frozen=True)
class Stock:
    """What every world draws from; made once, since it is the same in all."""

    blobs: dict[Digest, bytes]
    plans: tuple[KnownPlan, ...]  # legal ones
    nonsense: tuple[KnownPlan, ...]


@lru_cache(maxsize=1)
def stock() -> Stock:
    """Three small models, plans over them with any cuts, replicas and lanes, and things that are no plans."""
    rng = Random(7)
    graphs: dict[Digest, Graph] = {}
    names: dict[Digest, str] = {}
    blobs: dict[Digest, bytes] = {}
    for number in range(MODELS):
        graph = random_graph(rng, f"m{number}")
        digest, blob = pack_artifact(graph, rng.randbytes(100 + 150 * number))
        graphs[digest], names[digest], blobs[digest] = graph, f"m{number}", blob
    library = Library(graphs, names)
    plans: dict[Digest, KnownPlan] = {}
    while len(plans) < PLANS:
        bound = random_plan(rng, library)
        plan = bound.plan
        few = sum(len(one.needs) < MODELS for one in plans.values())
        if plan.wait is not Wait.NONE or (len(plan.models) < MODELS and few >= FEW):
            continue  # a trial compares plans of the same models
        needs = tuple(
            ArtifactNeed(model.name, model.artifact, len(blobs[model.artifact])) for model in plan.models
        )
        plans[plan.digest] = KnownPlan(plan.digest, plan.wire, needs, bound)
    nonsense = []
    for _ in range(3):
        wire = rng.randbytes(20)
        nonsense.append(KnownPlan(digest_bytes([wire]), wire, ()))
    return Stock(blobs, tuple(plans.values()), tuple(nonsense))
