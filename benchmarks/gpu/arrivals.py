"""When tasks arrive under an open load. Pure: the same seed gives the same arrivals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Arrival:
    """One task."""

    at_s: float  # since the load began
    model: str


def arrivals(
    rates_per_s: Mapping[str, float], seconds: float, *, poisson: bool, rng: Random
) -> list[Arrival]:
    """Every model at its rate, from 0 to `seconds`, by time; periodic ones begin at random phases."""
    found = []
    for model, rate_per_s in rates_per_s.items():
        gap_s = 1.0 / rate_per_s
        at_s = rng.expovariate(rate_per_s) if poisson else rng.random() * gap_s
        while at_s < seconds:
            found.append(Arrival(at_s, model))
            at_s += rng.expovariate(rate_per_s) if poisson else gap_s
    return sorted(found, key=lambda one: (one.at_s, one.model))


def shares(models: Sequence[str], weights: Sequence[int] = (1, 2, 4)) -> dict[str, float]:
    """TOP's mix: the models' shares of all tasks, 1:2:4 in the models' order."""
    used = [weights[index % len(weights)] for index in range(len(models))]
    return {model: weight / sum(used) for model, weight in zip(models, used, strict=True)}


def rates(mix: Mapping[str, float], service_s: Mapping[str, float], load: float) -> dict[str, float]:
    """Rates per second under which one server with these service times is busy for the share `load`."""
    mean_s = sum(share * service_s[model] for model, share in mix.items())
    return {model: load * share / mean_s for model, share in mix.items()}
