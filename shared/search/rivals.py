"""Rival serving policies as plans: what others do, on our engine and our kernels.

The plan space holds them all, so that the best plan is chosen among them, and so that a comparison compares
policies and nothing else. A policy turns a search into the search for its plan; what it decides is listed,
and everything else (partition, queues, launch intervals, weights, executor, limits) stays as asked for.
`docs/schedulers/rivals.md` says what each is and where it comes from. Other distributions may add policies
(`stageloom.policies`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from stageloom.shared.errors import StageloomError
from stageloom.shared.extensions import Extension, ExtensionGroup, Extensions, extensions
from stageloom.shared.plan import MAX_LANES, MAX_MEMBERS, StepChoice, Wait
from stageloom.shared.search.compose import Combination, ModelChoice
from stageloom.shared.search.job import SearchJob

LEAST_REPLICAS: Final = 2
"""Instances of a model for a policy of several instances, if the models ask for one."""

DEFAULT_BATCH: Final = 8
DEFAULT_BATCH_DELAY_US: Final = 2_000
"""For models that can run in batches but ask for none; usual values of serving systems."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A rival serving policy."""

    help: str  # one line
    plan: Callable[[SearchJob], SearchJob]
    decides: frozenset[str]
    """Fields of `PlanCreateRequest` that the policy sets itself."""

    scheduler: str = "sequential"  # for its combined blocks; another may be asked for unless it decides it


def policies() -> Mapping[str, Rival]:
    """Return Stageloom's own policies by the name that commands use."""
    return _RIVALS


def added_policies() -> Extensions:
    """Policies of other distributions, as their metadata says; none is imported."""
    return extensions(ExtensionGroup.POLICIES, _RIVALS)


def policy(name: str) -> Rival:
    """The policy of that name.

    Raises:
        SettingError: there is none; the error lists the names.
        ExtensionError: it is another distribution's, and does not load.
    """
    rival = _RIVALS.get(name)
    if rival is None:
        added = added_policies().named(name, "policy", _RIVALS)
        loaded = added.load(_rival)
        return replace(loaded, plan=_CheckedPlan(added, loaded.plan))
    return rival


def _rival(loaded: object) -> Rival:
    if not isinstance(loaded, Rival):
        raise TypeError(f"a policy is a Rival, not {type(loaded).__name__}")
    return loaded


@dataclass(frozen=True, slots=True)
class _CheckedPlan:
    """Another distribution's way from one search to another; what goes wrong in it names it."""

    extension: Extension
    plan: Callable[[SearchJob], SearchJob]

    def __call__(self, job: SearchJob) -> SearchJob:
        """Raises:
        ExtensionError: it fails, or returns something else.
        """
        try:
            planned = self.plan(job)
        except StageloomError:
            raise
        except Exception as error:
            raise self.extension.error(f"failed: {type(error).__name__}: {error}") from error
        if not isinstance(planned, SearchJob):
            raise self.extension.error(f"returned a {type(planned).__name__}, not a SearchJob")
        return planned


def _sequential(job: SearchJob) -> SearchJob:
    return _alone(job, tuple(_single(choice) for choice in job.models), lanes=1)


def _instances(job: SearchJob) -> SearchJob:
    """A lane per instance, as far as there are lanes."""
    models = tuple(replace(_several(choice), batch=1, batch_max_delay_us=0) for choice in job.models)
    return _alone(job, models, lanes=min(sum(choice.replicas for choice in models), MAX_LANES))


def _batching(job: SearchJob) -> SearchJob:
    return _alone(job, tuple(_batched(choice) for choice in job.models), lanes=1)


def _round_robin(job: SearchJob) -> SearchJob:
    chosen = _sequential(job)
    return replace(chosen, rules=replace(chosen.rules, step_choice=StepChoice.ROUND_ROBIN))


def _proportional(job: SearchJob) -> SearchJob:
    chosen = _sequential(job)
    return replace(chosen, rules=replace(chosen.rules, step_choice=StepChoice.WEIGHTED))


def _joint(job: SearchJob, wait: Wait) -> SearchJob:
    """One combined block of all models' i-th blocks, each model once."""
    return replace(
        job,
        models=tuple(_single(choice) for choice in job.models),
        combination=Combination.ALIGNED,
        members_max=min(len(job.models), MAX_MEMBERS),
        lanes=1,
        rules=replace(job.rules, wait=wait, wait_timeout_us=0, step_choice=StepChoice.RATIO),
    )


def _synchronised(job: SearchJob) -> SearchJob:
    return _joint(job, Wait.ALL)


def _shared_input(job: SearchJob) -> SearchJob:
    return _joint(job, Wait.NONE)


def _self_acceleration(job: SearchJob) -> SearchJob:
    """One combined block of all replicas of a model's block."""
    models = tuple(_several(choice) for choice in job.models)
    return replace(
        job,
        models=models,
        combination=Combination.REPLICAS,
        members_max=min(max(choice.replicas for choice in models), MAX_MEMBERS),
        lanes=1,
        rules=replace(job.rules, wait=Wait.NONE, wait_timeout_us=0, step_choice=StepChoice.RATIO),
    )


def _alone(job: SearchJob, models: tuple[ModelChoice, ...], *, lanes: int) -> SearchJob:
    """Every block by itself, its operators one after another."""
    return replace(
        job,
        models=models,
        scheduler="sequential",
        combination=Combination.ALONE,
        lanes=lanes,
        rules=replace(job.rules, wait=Wait.NONE, wait_timeout_us=0, step_choice=StepChoice.RATIO),
    )


def _single(choice: ModelChoice) -> ModelChoice:
    return replace(choice, replicas=1, batch=1, batch_max_delay_us=0)


def _several(choice: ModelChoice) -> ModelChoice:
    return replace(choice, replicas=max(choice.replicas, LEAST_REPLICAS))


def _batched(choice: ModelChoice) -> ModelChoice:
    """Run in batches if the model can; a model whose rows depend on each other takes one task at a time."""
    if not choice.graph.batchable:
        return _single(choice)
    if choice.batch > 1:
        return replace(choice, replicas=1)
    return replace(choice, replicas=1, batch=DEFAULT_BATCH, batch_max_delay_us=DEFAULT_BATCH_DELAY_US)


_ORDER: Final = frozenset({"combination", "members_max", "lanes", "step_choice", "wait", "wait_timeout_s"})
_ONE: Final = frozenset({"replicas", "batch", "batch_max_delay_s"})

_RIVALS: Mapping[str, Rival] = MappingProxyType(
    {
        "batching": Rival(
            "dynamic batches, one after another", _batching, _ORDER | {"scheduler", "replicas"}
        ),
        "instances": Rival(
            "N instances of each model, each on a lane of its own",
            _instances,
            _ORDER | {"scheduler", "batch", "batch_max_delay_s"},
        ),
        "proportional": Rival(
            "blocks take turns by the models' weights", _proportional, _ORDER | _ONE | {"scheduler"}
        ),
        "round_robin": Rival("blocks take turns", _round_robin, _ORDER | _ONE | {"scheduler"}),
        "self_acceleration": Rival(
            "replicas of one model scheduled together (TOP)", _self_acceleration, _ORDER, "ios"
        ),
        "sequential": Rival(
            "one operator after another, one task after another", _sequential, _ORDER | _ONE | {"scheduler"}
        ),
        "shared_input": Rival(
            "one graph of all models over one task (Yu et al., TOP)", _shared_input, _ORDER | _ONE, "ios"
        ),
        "synchronised": Rival(
            "one graph of all models, run when each has a task (POS)", _synchronised, _ORDER | _ONE, "ios"
        ),
    }
)
