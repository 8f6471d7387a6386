"""From GPG's action to a schedule: one roll-out, several, or one with a look-ahead.

TOP (V-C.2, algorithm 2): the action m becomes the ending of rank floor(m * M) of the M that the state has;
here it is unranked (`stageloom.shared.search.ranking`) where TOP lists them all. Ours, as the action alone
misses by more than TOP's figures say once M is large (docs/schedulers/gpg.md):

- `sampled`: roll-outs with noise on the action; the cheapest counts.
- `looked_ahead`: per state some ranks around the action and some spread evenly, each with its stage's seconds
  and the value of what it leaves; the best ones are then changed part by part of the state while that helps.
  `width` partial schedules are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from stageloom.shared.policy.gpg.network import EncodedBlock
from stageloom.shared.search.endings import Endings, TooManyError
from stageloom.shared.search.ranking import RankedEndings
from stageloom.shared.search.stages import Stages

_PACKINGS = 4000  # of one part of a state, before fewer groups are allowed in it
_CHANGES = 400  # of one part that are scored


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAhead:
    """How many of a state's endings are scored."""

    around: int = 8  # ranks near the action
    spread: int = 24  # ranks evenly over all
    noise: float = 0.1  # standard deviation around the action
    improved: int = 2  # of those, the best so many are changed part by part
    sweeps: int = 3
    width: int = 1  # partial schedules kept


def acted(block: EncodedBlock, stages: Stages) -> list[int]:
    """One roll-out that takes the action as it is; endings in run order."""
    return _roll_out(stages, lambda state: float(block.actions([state])[0]))


def sampled(block: EncodedBlock, stages: Stages, *, count: int, noise: float, random: Random) -> list[int]:
    """The cheapest of `count` roll-outs, the first one without noise."""

    def act(state: int) -> float:
        return _clipped(float(block.actions([state])[0]) + random.gauss(0.0, noise))

    found = [acted(block, stages), *(_roll_out(stages, act) for _ in range(count - 1))]
    return min(found, key=lambda endings: schedule_s(stages, endings))


def drawn(stages: Stages, random: Random) -> list[int]:
    """Endings drawn uniformly; what a policy that learned nothing does."""
    return _roll_out(stages, lambda state: random.random())


def schedule_s(stages: Stages, endings: Sequence[int]) -> float:
    return sum(map(stages.__getitem__, endings))


def ranked(stages: Stages, state: int) -> RankedEndings:
    """The endings of a state; where they are too many to count, those of fewer and smaller groups."""
    space = stages.space
    while (found := _counted(space, state)) is None:
        r, s = (space.r, (space.s + 1) // 2) if space.s > 1 else (max(space.r // 2, 1), 1)
        space = Endings(space.graph, rule=space.rule, r=r, s=s)
    return found


def _counted(space: Endings, state: int) -> RankedEndings | None:
    try:
        return RankedEndings(space, state, _PACKINGS)
    except TooManyError:
        return None


@dataclass(frozen=True, slots=True)
class _Partial:
    """A schedule whose last stages are chosen."""

    state: int  # operators left
    endings: tuple[int, ...]  # in run order
    spent: float  # as a share of the block's seconds
    expected: float  # with what is left


def looked_ahead(block: EncodedBlock, stages: Stages, how: LookAhead, random: Random) -> list[int]:
    """Endings in run order."""
    everything = (1 << stages.graph.size) - 1
    kept = [_Partial(everything, (), 0.0, 0.0)]
    while kept[0].state:
        found: dict[int, _Partial] = {}
        for partial in kept:
            for one in _extended(block, stages, how, partial, random) if partial.state else [partial]:
                known = found.get(one.state)
                if known is None or one.expected < known.expected:
                    found[one.state] = one
        kept = sorted(found.values(), key=lambda one: (one.expected, one.state))[: how.width]
    return list(kept[0].endings)


def best_ending(
    block: EncodedBlock, stages: Stages, how: LookAhead, state: int, random: Random
) -> tuple[int, float]:
    """What the look-ahead would take, and the share of the seconds that it thinks is still to come."""
    scores = _scored(block, stages, how, state, random)
    (best,) = scores.best(1)
    return best, scores[best]


def _extended(
    block: EncodedBlock, stages: Stages, how: LookAhead, partial: _Partial, random: Random
) -> list[_Partial]:
    """The best endings of a partial schedule's state, as longer partial schedules."""
    scores = _scored(block, stages, how, partial.state, random)
    return [
        _Partial(
            partial.state ^ ending,
            (ending, *partial.endings),
            partial.spent + stages[ending] / block.total_s,
            partial.spent + scores[ending],
        )
        for ending in scores.best(how.width)
    ]


def _scored(block: EncodedBlock, stages: Stages, how: LookAhead, state: int, random: Random) -> "_Scores":
    space = ranked(stages, state)
    scores = _Scores(block, stages, state)
    scores.add(_proposed(block, space, how, state, random))
    _improve(scores, space, scores.best(how.improved), how.sweeps)
    return scores


class _Scores(dict[int, float]):
    """Per ending its stage plus the value of what it leaves, as a share of the block's seconds."""

    def __init__(self, block: EncodedBlock, stages: Stages, state: int) -> None:
        super().__init__()
        self._block, self._stages, self._state = block, stages, state

    def add(self, endings: Sequence[int]) -> None:
        """Score those that are new, all at once."""
        new = [ending for ending in dict.fromkeys(endings) if ending not in self]
        if new:
            values = self._block.values([self._state ^ ending for ending in new]).tolist()
            for ending, value in zip(new, values, strict=True):
                self[ending] = self._stages[ending] / self._block.total_s + value

    def best(self, count: int) -> list[int]:
        """The lowest scores first."""
        return sorted(self, key=lambda ending: (self[ending], ending))[:count]


def _proposed(
    block: EncodedBlock, space: RankedEndings, how: LookAhead, state: int, random: Random
) -> list[int]:
    action = float(block.actions([state])[0])
    actions = [action]
    actions += [_clipped(action + random.gauss(0.0, how.noise)) for _ in range(how.around - 1)]
    actions += [(place + random.random()) / how.spread for place in range(how.spread)]
    return [space.unrank(int(action * space.count)) for action in actions]


def _improve(scores: _Scores, space: RankedEndings, starts: Sequence[int], sweeps: int) -> None:
    """Change endings part by part to the best that can be had, each until nothing helps.

    All at once: a forward pass over what two of them may become costs little more than over one's.
    """
    best = list(starts)
    moving = list(range(len(best)))
    for _ in range(sweeps):
        before = list(best)
        for part in range(space.parts):
            others = {at: _thinned(space.changed(best[at], part)) for at in moving}
            scores.add([ending for group in others.values() for ending in group])
            for at, group in others.items():
                best[at] = min((best[at], *group), key=lambda ending: (scores[ending], ending))
        moving = [at for at in moving if best[at] != before[at]]
        if not moving:
            return


def _thinned(endings: Sequence[int]) -> Sequence[int]:
    return endings[:: 1 + len(endings) // _CHANGES]


def _roll_out(stages: Stages, act: Callable[[int], float]) -> list[int]:
    state = (1 << stages.graph.size) - 1
    found: list[int] = []
    while state:
        space = ranked(stages, state)
        found.append(space.unrank(int(act(state) * space.count)))
        state ^= found[-1]
    found.reverse()
    return found


def _clipped(action: float) -> float:
    return min(max(action, 0.0), 1.0 - 1e-9)
