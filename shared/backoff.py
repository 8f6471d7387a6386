"""Retry delays: exponential, capped, with jitter, so that a fleet does not return all at once."""

from collections.abc import Iterator
from random import Random


def backoff_s(
    rng: Random, *, first_s: float = 0.5, factor: float = 2.0, cap_s: float = 30.0
) -> Iterator[float]:
    """Endless delays; the n-th is uniform over [half, whole] of min(first_s * factor**n, cap_s).

    Half of each delay is fixed: a delay near zero would let a device knock again before the planner has
    done anything. The random half spreads the fleet. A caller starts a new generator after a success.

    Raises:
        ValueError: a parameter that would make the delays fall or vanish.
    """
    if first_s <= 0 or factor < 1 or cap_s < first_s:
        raise ValueError(f"no backoff with first {first_s} s, factor {factor}, cap {cap_s} s")
    whole_s = first_s
    while True:
        yield whole_s * (0.5 + 0.5 * rng.random())
        whole_s = min(whole_s * factor, cap_s)
