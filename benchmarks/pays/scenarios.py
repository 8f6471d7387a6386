"""Loads that change and stay changed. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

NIGHT: Final = 0.25
DAY: Final = 0.9
BESIDE: Final = 0.6  # what two lanes carry with ease, and one and a half hardly


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A load that stays; `share` of the capacity that was measured at the phase's own mix."""

    name: str
    share: float
    turned: bool = False  # the weights of the models in reverse order
    core_taken: bool = False  # a foreign process computes on one core all the time
    lead: bool = False  # what was before: half as long, and nothing is expected of it

    def weights(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Of the models, in their order."""
        return tuple(reversed(weights)) if self.turned else tuple(weights)


SCENARIOS: Final[Mapping[str, tuple[Phase, ...]]] = {
    "night_and_day": (
        Phase(name="day before", share=DAY, lead=True),
        Phase(name="night", share=NIGHT),
        Phase(name="day", share=DAY),
        Phase(name="night", share=NIGHT),
        Phase(name="day", share=DAY),
    ),
    "turning_mix": (
        Phase(name="mix before", share=DAY, lead=True),
        Phase(name="mix turned", share=DAY, turned=True),
        Phase(name="mix back", share=DAY),
    ),
    "core_taken": (
        Phase(name="both cores", share=BESIDE, lead=True),
        Phase(name="core taken", share=BESIDE, core_taken=True),
        Phase(name="core back", share=BESIDE),
    ),
}
"""By name. A phase whose name came before is a second visit."""


def visits(phases: Sequence[Phase]) -> list[int]:
    """Of each phase, the how manieth of its name it is; 1 first, 0 for one that leads in."""
    seen: dict[str, int] = {}
    found = []
    for phase in phases:
        seen[phase.name] = seen.get(phase.name, 0) + 1
        found.append(0 if phase.lead else seen[phase.name])
    return found
