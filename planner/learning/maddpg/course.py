"""Which work comes next, and what is learned from its result: a training without clock, process or network.

    course = Course(problem, settings, seed)
    while (work := course.next_work()) is not None:
        course.take(work, run(problem, course.table, settings, work))

Work may be done in any process, with a `problem.table()` of its own. With several workers `next_work` is
asked as often as there is room; it gives None while the course waits for results, and `done` says that there
is nothing more. Work that was lost (a killed worker) is handed out again by `lost`. In one process, one after
another, equal seeds give equal courses, interrupted or not.

1. The rivals' plans (`seeds`) are evaluated: the best is the best so far, and where the actors start.
2. They are run, some with noise on their actions, until there are enough transitions to learn from.
3. Episodes of the policy with falling noise; after each one the learner's updates. Every so often the policy
   is validated, and the most promising plans met on the way are evaluated.
4. The best plan and the best policy are evaluated on arrivals that chose neither.
"""

import io
import json
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec import convert, to_builtins

from stageloom.planner.learning.maddpg.candidates import Candidates, seeds
from stageloom.planner.learning.maddpg.learner import Learner
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.replay import Floats, Transitions
from stageloom.planner.learning.maddpg.settings import MaddpgSettings, Start
from stageloom.planner.learning.maddpg.work import (
    Collect,
    Evaluate,
    Weights,
    Work,
    WorkResult,
    clipped_row,
)
from stageloom.planner.tournament.score import Score, best_of, improves
from stageloom.shared.errors import DecodeError
from stageloom.shared.policy.maddpg.network import MaddpgNetwork, state_of

VALIDATION_SEED = 2_000_000_000
FRESH_SEED = 2_100_000_000
STATE_FORMAT = 4
UNTRAINED = "untrained"
ALONE = "alone, fast"
"""The rival's plan with every block alone."""
_POLICY, _PLAN, _FRESH = "policy", "plan", "fresh "


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """One validation, for the curves; the best plan so far beside the policy."""

    transitions: int
    updates: int
    policy: Score
    best: Score
    losses: dict[str, float]

    def plain(self) -> dict[str, Any]:
        """Plain values by field name, for JSON."""
        found: dict[str, Any] = to_builtins(self)
        return found


class TrainingCourse:
    """One training; `state` and `restored` carry it over."""

    def __init__(self, problem: Problem, settings: MaddpgSettings, seed: int) -> None:
        self.problem, self.settings, self.seed = problem, settings, seed
        self.learner = Learner(problem.space, settings, seed)
        self.table = problem.table()  # all that any worker found; the only worker's own in one process
        self.candidates = Candidates(problem.space)
        self.seeds = seeds(problem.space) if settings.seeded else self._untrained()
        self.seeds_worth: dict[str, Score] = {}  # of the rivals' plans, by the seeds' names
        self.history: list[TrainingProgress] = []
        self.policy: Score | None = None  # of the best policy so far
        self._policy_top: Score | None = None  # the most throughput of any policy
        self.policy_weights: Weights = self.learner.policy_weights()
        self.fresh: dict[str, Score] = {}  # best plan, policy, rivals on arrivals that chose none of them
        self.transitions = 0
        self._handed = 0  # transitions that are collected or being collected
        self._number = 0
        self._owed = 0.0  # updates
        self._validated = 0  # transitions at the last validation
        self._losses: dict[str, float] = {}
        self._stopped = False
        self._waiting: deque[Evaluate] = deque(
            self._evaluation(f"{_PLAN}, {name}", row=row) for name, row in self.seeds.items()
        )
        self._out: dict[int, Work] = {}

    @property
    def done(self) -> bool:
        """Whether there is no more to do."""
        return self._stopped and not self._waiting and not self._out and self.finished

    @property
    def stopped(self) -> bool:
        """Whether no more episodes come."""
        return self._stopped

    @property
    def settled(self) -> bool:
        """Whether no more episodes come, and no evaluation is open that could give a new best."""
        judging = (one for one in (*self._waiting, *self._out.values()) if isinstance(one, Evaluate))
        return self._stopped and all(one.name.startswith(_FRESH) for one in judging)

    @property
    def plan_worth(self) -> Score | None:
        """What the best plan is worth: on arrivals that did not choose it, once that is known."""
        best = None if self.candidates.best is None else self.candidates.best[1]
        return self.fresh.get(_FRESH + _PLAN, best)

    @property
    def policy_worth(self) -> Score | None:
        """The same of the best policy; None before its first validation."""
        return self.fresh.get(_FRESH + _POLICY, self.policy)

    @property
    def rivals_worth(self) -> dict[str, Score]:
        """Of every block alone and the best of the rivals, by the seeds' names, as `plan_worth`."""
        return {name: self.fresh.get(_FRESH + name, self.seeds_worth[name]) for name in self._rivals()}

    def _rivals(self) -> list[str]:
        """The seeds that the last look judges beside what was learned."""
        names = list(self.seeds_worth)
        best = [names[best_of(list(self.seeds_worth.values()))]] if names else []
        return list(dict.fromkeys([*(name for name in names if name == ALONE), *best]))

    @property
    def finished(self) -> bool:
        """Whether the best plan, the policy and the rivals were evaluated on fresh arrivals."""
        return {_FRESH + name for name in (_PLAN, _POLICY, *self._rivals())} <= self.fresh.keys()

    def stop(self) -> None:
        """End the episodes; only the evaluation on fresh arrivals is left."""
        if self._stopped:
            return
        self._stopped = True
        unjudged = self.candidates.best is None and not self._out
        for _ in range(len(self._waiting) - unjudged):
            self._waiting.pop()

    def abandon(self) -> None:
        """Give up all work that is out, as after Ctrl-C."""
        for work in list(self._out.values()):
            self.lost(work)

    def next_work(self) -> Work | None:
        """What to do next; None while all that is left waits for results."""
        work = self._next()
        if work is not None:
            self._out[work.number] = work
        return work

    def lost(self, work: Work) -> None:
        """Hand out again work whose result will never come."""
        if self._out.pop(work.number, None) is None:
            return
        if isinstance(work, Evaluate):
            self._waiting.appendleft(work)
        else:
            self._handed -= work.steps

    def take(self, work: Work, done: WorkResult) -> TrainingProgress | None:
        """Learn from a result; returns the progress if it was a validation. A repeated result counts once."""
        self.table.put(done.schedules)
        self.table.asked_elsewhere(done.asked)
        if self._out.pop(work.number, None) is None:
            return None
        if isinstance(done.found, Transitions):
            self._collected(done.found)
            return None
        assert isinstance(work, Evaluate)
        return self._evaluated(work, done.found)

    def _next(self) -> Work | None:
        if self._waiting:
            return self._waiting.popleft()
        if self._stopped:
            return self._last()
        if not self._handed and self._out:
            return None  # where the actors start is not known yet
        if self._handed >= self.settings.transitions:
            if not self._out:
                self.stop()
                return self._last()
            return None
        warming = self._handed < self.settings.learn_from
        if not warming and not self.learner.ready and self._out:
            return None
        steps = min(self.settings.episode_steps, self.settings.transitions - self._handed)
        self._handed += steps
        return self._episode(steps, warming)

    def _last(self) -> Work | None:
        """The evaluation on fresh arrivals, of plan, policy and rivals, once it is known which they are."""
        if not self.settled:
            return None
        pending = {work.name for work in self._out.values() if isinstance(work, Evaluate)} | self.fresh.keys()
        best = self.candidates.best
        if best is not None and _FRESH + _PLAN not in pending:
            return self._evaluation(_FRESH + _PLAN, row=best[0])
        if best is not None and _FRESH + _POLICY not in pending:
            return self._evaluation(_FRESH + _POLICY, weights=self.policy_weights)
        for name in self._rivals():
            if _FRESH + name not in pending:
                return self._evaluation(_FRESH + name, row=self.seeds[name])
        return None

    def _episode(self, steps: int, warming: bool) -> Collect:
        number = self._numbered()
        settings = self.settings
        share = self._handed / settings.transitions
        noise = settings.noise + (settings.noise_end - settings.noise) * share
        rows: tuple[tuple[float, ...], ...] = ()
        if warming and settings.start is not Start.PAPER:
            # Each episode begins with another plan, so that every one is met with queues of all lengths.
            first = number % len(self.seeds)
            seeded = tuple(self.seeds.values())
            rows = (*seeded[first:], *seeded[:first])
            if self._handed <= settings.seed_share * settings.learn_from:
                noise = 0.0
        return Collect(
            number=number,
            seed=self.seed * 100_000 + number,
            steps=steps,
            weights=None if rows else self.learner.policy_weights(),
            rows=rows,
            noise=noise,
            uniform=settings.uniform_share * (1.0 if warming else 1.0 - share),
        )

    def _untrained(self) -> dict[str, tuple[float, ...]]:
        """What the actors say before they learned anything, held: the first plan where no rival's is."""
        space = self.problem.space
        network = MaddpgNetwork(self.learner.policy_weights(), space.agents)
        return {UNTRAINED: clipped_row(network.actions(state_of(space, ())))}

    def _evaluation(
        self, name: str, *, row: tuple[float, ...] = (), weights: Weights | None = None
    ) -> Evaluate:
        first = FRESH_SEED if name.startswith(_FRESH) else VALIDATION_SEED
        count = self.settings.validation_seeds * (2 if name.startswith(_FRESH) else 1)
        return Evaluate(
            number=self._numbered(),
            name=name,
            seeds=tuple(first + at for at in range(count)),
            steps=self.settings.validation_steps,
            row=row,
            weights=weights,
        )

    def _numbered(self) -> int:
        self._number += 1
        return self._number

    def _collected(self, found: Transitions) -> None:
        self.learner.add(found)
        self.transitions += len(found)
        if self.learner.ready:
            self._owed += len(found) * self.settings.updates_per_transition
            count = int(self._owed)
            self._owed -= count
            if count:
                self._losses = self.learner.update(count)
        due = self._validated + self.settings.validate_every
        last = self.transitions >= self.settings.transitions
        if self.learner.ready and not self._stopped and (last or self.transitions >= due):
            self._validated = self.transitions
            self._validate()

    def _validate(self) -> None:
        kept = self.learner.replay.everything()
        rewards: Floats = self.learner.rewards(kept)[:, 0]
        for actions in self.candidates.promising(kept, rewards, self.settings.candidates):
            self._waiting.append(self._evaluation(f"{_PLAN}, met in training", row=actions))
        self._waiting.append(self._evaluation(_POLICY, weights=self.learner.policy_weights()))

    def _evaluated(self, work: Evaluate, worth: Score) -> TrainingProgress | None:
        if work.name.startswith(_FRESH):
            self.fresh[work.name] = worth
            return None
        if work.weights is None:
            name = work.name.removeprefix(f"{_PLAN}, ")
            if name in self.seeds:
                self.seeds_worth[name] = worth
            if self.candidates.judged(work.row, worth) and self.settings.pull and self.transitions:
                self.learner.aim(work.row)
            if self.settings.start is Start.BEST_SEED and self._seeds_are_judged():
                self._start()
            return None
        top = self._policy_top or worth
        self._policy_top = max(top, worth, key=lambda score: score.throughput_per_s)
        if self.policy is None or improves(worth, self.policy, top):
            self.policy, self.policy_weights = worth, work.weights
        assert self.candidates.best is not None
        progress = TrainingProgress(
            transitions=self.transitions,
            updates=self.learner.updates,
            policy=worth,
            best=self.candidates.best[1],
            losses=self._losses,
        )
        self.history.append(progress)
        return progress

    def _seeds_are_judged(self) -> bool:
        evaluating = any(isinstance(one, Evaluate) for one in (*self._waiting, *self._out.values()))
        return not self.transitions and not evaluating

    def _start(self) -> None:
        """Start the actors at the best seed's actions: that is the best policy so far."""
        best = self.candidates.best
        assert best is not None
        self.learner.start_at(best[0])
        self.policy_weights = self.learner.policy_weights()
        self._waiting.append(self._evaluation(_POLICY, weights=self.policy_weights))

    def state(self) -> bytes:
        """All that is needed to resume; work that is out is handed out again."""
        lost = [work for work in self._out.values() if isinstance(work, Evaluate)]
        flying = sum(work.steps for work in self._out.values() if isinstance(work, Collect))
        waiting = [*lost, *self._waiting]
        plain = {
            "format": STATE_FORMAT,
            "seed": self.seed,
            "settings": self.settings.plain(),
            "candidates": self.candidates.saved(),
            "seeds_worth": self.seeds_worth,
            "schedules": self.table.saved(),
            "history": self.history,
            "policy": self.policy,
            "policy_top": self._policy_top,
            "fresh": self.fresh,
            "transitions": self.transitions,
            "handed": self._handed - flying,
            "number": self._number,
            "owed": self._owed,
            "validated": self._validated,
            "losses": self._losses,
            "stopped": self._stopped,
            "waiting": [
                [work.number, work.name, list(work.seeds), work.steps, list(work.row)] for work in waiting
            ],
        }
        tensors = {
            "policy": _tensors(self.policy_weights),
            "waiting": [None if work.weights is None else _tensors(work.weights) for work in waiting],
        }
        buffer = io.BytesIO()
        torch.save(
            {"plain": json.dumps(to_builtins(plain)), "tensors": tensors, "learner": self.learner.state()},
            buffer,
        )
        return buffer.getvalue()

    @classmethod
    def restored(cls, problem: Problem, raw: bytes) -> "TrainingCourse":
        """The course that gave `state`.

        Raises:
            DecodeError: the bytes are none, or of another space.
        """
        try:
            saved = torch.load(io.BytesIO(raw), weights_only=True)
            plain = json.loads(saved["plain"])
            if plain["format"] != STATE_FORMAT:
                raise ValueError(f"format {plain['format']}")
            course = cls(problem, MaddpgSettings.of(plain["settings"]), plain["seed"])
            course.learner = Learner.restored(problem.space, saved["learner"])
            course._restore(plain, saved["tensors"])
        except Exception as error:  # torch raises whatever its unpickler meets
            raise DecodeError(
                f"not the state of a training of maddpg: {str(error)[:200]}", remedy="begin a new training"
            ) from error
        return course

    def _restore(self, plain: dict[str, Any], tensors: dict[str, Any]) -> None:
        self.candidates.restore(plain["candidates"])
        self.seeds_worth = convert(plain["seeds_worth"], dict[str, Score])
        self.table.restore(plain["schedules"])
        self.history = convert(plain["history"], list[TrainingProgress])
        self.policy = convert(plain["policy"], Score | None)
        self._policy_top = convert(plain["policy_top"], Score | None)
        self.policy_weights = _arrays(tensors["policy"])
        self.fresh = convert(plain["fresh"], dict[str, Score])
        self.transitions, self._handed = plain["transitions"], plain["handed"]
        self._number, self._owed = plain["number"], plain["owed"]
        self._validated, self._losses = plain["validated"], plain["losses"]
        self._stopped = plain["stopped"]
        self._waiting = deque(
            Evaluate(
                number=number,
                name=name,
                seeds=tuple(given),
                steps=steps,
                row=tuple(row),
                weights=None if weights is None else _arrays(weights),
            )
            for (number, name, given, steps, row), weights in zip(
                plain["waiting"], tensors["waiting"], strict=True
            )
        )


def _tensors(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in weights.items()}


def _arrays(tensors: dict[str, torch.Tensor]) -> dict[str, Floats]:
    return {name: values.numpy() for name, values in tensors.items()}
