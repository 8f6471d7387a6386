"""A training of maddpg on what the store knows of a device, with workers on this machine or on Ray."""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import structs

from stageloom.planner.cluster.interface import SearchPool
from stageloom.planner.cluster.search_pool import AnytimePool
from stageloom.planner.learning.kept_run import begun_with, held_run, keep_begun_with
from stageloom.planner.learning.maddpg.course import ALONE, TrainingCourse
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.stored import StoredProblem, stored_problem
from stageloom.planner.learning.maddpg.stored_check import checked_as_trained, verdict_on
from stageloom.planner.learning.maddpg.train import FILE, MaddpgResult, load_run, save_run, train
from stageloom.planner.learning.messages import Tell, Trained, TrainingStep
from stageloom.planner.replan.policy_file import provenance_of
from stageloom.planner.schema.policy import PolicyVerdict
from stageloom.planner.schema.training import (
    MaddpgTrainingReply,
    MaddpgTrainingRequest,
    MaddpgValidation,
    TrainedScore,
)
from stageloom.planner.store.store import ReadStore
from stageloom.planner.tournament.score import Score, best_of
from stageloom.planner.twin.device_file import device_toml
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import DecodeError, StageloomError
from stageloom.shared.plan import Plan
from stageloom.shared.policy.maddpg.checkpoint import KIND, decode
from stageloom.shared.search.compose import Rules
from stageloom.shared.text import bounded

log = logging.getLogger(__name__)

LOCAL: Final = "local"
"""What names a Ray of this machine's own."""

_EVERY_S: Final = 0.25  # between two tellings


def train_stored(store: ReadStore, request: MaddpgTrainingRequest, tell: Tell) -> Trained:
    """Begin a training, or go on with it; to its end, the budget's, or SIGINT.

    Raises:
        InputError: as `stored_problem`.
        RefusedError: the same training runs already.
        UnavailableError: its workers die again and again.
    """
    tell(TrainingStep(text="reading what is known of the device"))
    found = stored_problem(store, request)
    settings = MaddpgSettings.of_length(request.transitions)
    about = about_training(request, found, settings)
    with held_run(store.data_dir, about) as folder:
        spent_s, state = 0.0, None
        if kept := _kept(folder, about):
            found, spent_s, state = kept
            tell(TrainingStep(text=f"going on after {spent_s:.0f} s of training"))
        else:
            keep_begun_with(folder, found)
        tell(TrainingStep(text=f"twin: {found.times}; arrivals: {found.arrivals}; {about['blocks']} blocks"))
        began_s = time.monotonic()
        pool = _pool(request)
        try:
            trained = train(
                found.problem,
                settings,
                request.seed,
                clock=time.monotonic,
                budget_s=request.budget_s,
                state=state,
                spent_s=spent_s,
                save=lambda made: save_run(folder, about, spent_s + time.monotonic() - began_s, made),
                pool=pool,
                on_result=_Follower(tell),
            )
        finally:
            if pool is not None:
                pool.close()
        verdict = _verdict(found, trained, tell)
    left = _result(found, trained, spent_s, verdict)
    return left if trained.ended == "interrupted" else structs.replace(left, run=str(folder))


def _kept(folder: Path, about: Mapping[str, Any]) -> tuple[StoredProblem, float, bytes] | None:
    """What a kept run began with, its seconds and its state.

    None where there is none, or one that this version cannot go on with. Of that nothing is left: with what
    the next run begins with, its state would be of other arrivals.
    """
    kept = load_run(folder, about)
    earlier: StoredProblem | None = begun_with(folder) if kept else None
    if kept and earlier:
        try:
            TrainingCourse.restored(earlier.problem, kept[1])
            return earlier, *kept
        except DecodeError as error:
            log.warning("a training begins anew: %s", error)
    (folder / FILE).unlink(missing_ok=True)
    return None


def _verdict(found: StoredProblem, trained: MaddpgResult, tell: Tell) -> PolicyVerdict | None:
    """That of the policy's check; None after Ctrl-C, and where the check fails: the policy outlives both."""
    if trained.ended == "interrupted":
        return None
    policy = decode(trained.checkpoint)
    on = checked_as_trained(found.problem, found.times)
    try:
        return verdict_on(policy, digest_bytes([trained.checkpoint]), on, tell)
    except KeyboardInterrupt:
        return None
    except StageloomError as error:
        tell(TrainingStep(text=bounded(f"the policy cannot be checked: {error}")))
        return None


def default_workers() -> int:
    """All cores but one, which the learner needs."""
    return max((os.cpu_count() or 1) - 1, 1)


def _pool(request: MaddpgTrainingRequest) -> SearchPool | None:
    """Where episodes and evaluations run; None: in this process, which serves one as well."""
    workers = request.workers or default_workers()
    if workers == 1 and not request.ray_address:
        return None
    address = "" if request.ray_address == LOCAL else request.ray_address
    return AnytimePool(workers, use_ray=bool(request.ray_address), ray_address=address, idle_s=None)


def about_training(
    request: MaddpgTrainingRequest, found: StoredProblem, settings: MaddpgSettings
) -> dict[str, Any]:
    """All that makes a training this one: what was begun of another is not gone on with."""
    space = found.problem.space
    return {
        "policy": KIND,
        "device": request.device,
        "device_class": space.device_class,
        "models": [[model.artifact, *model.cuts, model.replicas, model.batch] for model in space.models],
        "template": _fixed(found.problem.template),
        "scheduler": request.scheduler,
        "blocks": space.bins,
        "members_max": space.members_max,
        "twin": request.twin,
        "rates": {rate.model: rate.per_s for rate in request.rates},
        "last_s": request.last_s,
        "settings": settings.plain(),
        "seed": request.seed,
    }


def _fixed(template: Plan) -> str:
    """All of a template that no training changes, in a digest: another one is another problem."""
    queues = [model.queue for model in template.models]
    fixed = (template.lanes, template.executors, template.resources, Rules.of(template), queues)
    return digest_bytes([repr(fixed).encode()])


def _result(
    found: StoredProblem, trained: MaddpgResult, resumed_s: float, verdict: PolicyVerdict | None
) -> Trained:
    rows = {
        **rivals_scores(trained.rivals_worth),
        "policy": trained.policy_worth,
        "best plan": trained.plan_worth,
    }
    curves = [validation.plain() for validation in trained.history]
    reply = MaddpgTrainingReply(
        checkpoint=digest_bytes([trained.checkpoint]),
        plan=trained.plan.digest[:12],  # the store may know it by another name
        ended=trained.ended,
        train_s=trained.train_s,
        resumed_s=resumed_s,
        transitions=trained.transitions,
        updates=trained.updates,
        twin=bounded(found.times),
        arrivals=bounded(found.arrivals),
        arrivals_per_s=tuple(found.problem.arrivals_per_s),
        rows={name: TrainedScore(**score.plain()) for name, score in rows.items()},
        curves=tuple(msgspec.convert(curve, MaddpgValidation) for curve in curves),
        device_file=device_toml(found.device),
        verdict=verdict,
    )
    return Trained(
        policy=KIND,
        device_class=found.problem.space.device_class,
        checkpoint=trained.checkpoint,
        provenance=provenance_of(decode(trained.checkpoint)),
        curves=curves,
        plan=trained.plan.wire,
        verdict=verdict,
        maddpg=reply,
    )


def rivals_scores(rivals_worth: Mapping[str, Score]) -> dict[str, Score]:
    """Of the rivals' plans that were evaluated: every block alone, and the best of all."""
    scores = list(rivals_worth.values())
    best = scores[best_of(scores)] if scores else None
    named = {"sequential": rivals_worth.get(ALONE), "best rival": best}
    return {name: score for name, score in named.items() if score is not None}


class _Follower:
    """Tells how far a course is, now and then and at each validation."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told_s = float("-inf")
        self._validated = -1

    def __call__(self, course: TrainingCourse) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < _EVERY_S and len(course.history) == self._validated:
            return
        self._told_s, self._validated = now_s, len(course.history)
        self._tell(
            TrainingStep(
                text="last look at the best" if course.stopped else "training",
                done=course.transitions,
                size=course.settings.transitions,
                figures=_figures(course),
            )
        )


def _figures(course: TrainingCourse) -> dict[str, float]:
    """What decides between plans, of the rivals, the policy and the best plan."""
    if not course.history:  # they change with each rival that is evaluated
        return {}
    shown: dict[str, Score | None] = {
        "rival": rivals_scores(course.rivals_worth).get("best rival"),
        "policy": course.policy_worth,
        "best": course.plan_worth,
    }
    found: dict[str, float] = {}
    for name, score in shown.items():
        if score is not None:
            found |= {f"{name} tasks/s": score.throughput_per_s, f"{name} p99 ms": 1e3 * score.p99_s}
    return found
