"""What placement does in the simulation of `placed`, as tables of Markdown.

    python -m tests.engine.placed_tables [--batches N]

The first: for a fast resource and one that is k times slower, the highest rate of every policy over the known
answer, batches evenly spaced, and the mean latency under Poisson arrivals at 0.8 of the known rate, beside
that of whole models on both. A second is what the whole model takes on the fast one. The second: transfers in
front of the tails. The third: the slow resource becomes slower. Every figure is arithmetic, the same on any
machine.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from stageloom.shared.engine.residency import Bus
from stageloom.shared.plan import PlacementPolicy
from tests.engine.placed import (
    CUTS,
    Scene,
    World,
    evenly,
    highest_rate,
    known_rate,
    poisson,
    two_resources,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", type=int, default=300)
    batches: int = parser.parse_args().batches
    for line in (*report(batches), "", *transfers(batches), "", *slowing_down()):
        print(line)  # noqa: T201


def report(batches: int) -> Iterator[str]:
    """A table of Markdown, row by row."""
    yield "| k | tail | policy | known | reached | heads on the fast one | Poisson: tails away | latency |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for slow, tail in CUTS:
        known = known_rate(slow, tail)
        arrivals_s = poisson(0.8 * known, 10 * batches, 1)
        whole = World(Scene(parts_s=[[1.0, slow]], policy=PlacementPolicy.DM), arrivals_s).run()
        for policy in (PlacementPolicy.EAGER, PlacementPolicy.DM, PlacementPolicy.DMDA, PlacementPolicy.HEFT):
            scene = two_resources(slow, tail, policy)
            kept = two_resources(slow, tail, policy, heads=(0,))
            played = World(scene, arrivals_s).run()
            yield (
                f"| {slow:g} | {tail:.0%} | {policy.value} | {known:.3f} "
                f"| {highest_rate(scene, known, batches=batches):.3f} "
                f"| {highest_rate(kept, known, batches=batches):.3f} "
                f"| {fmean(played.away):.0%} | {fmean(played.latencies_s):.2f} |"
            )
        yield (
            f"| {slow:g} | whole | dm | {1 + 1 / slow:.3f} | | "
            f"| {fmean(whole.away):.0%} | {fmean(whole.latencies_s):.2f} |"
        )


def transfers(batches: int) -> Iterator[str]:
    """The balanced cut at k = 3, tails behind a transfer of so many seconds; heads on the fast resource."""
    yield "| transfer | policy | beta | reached | without prefetch | tails away at 0.9 | latency at 0.9 |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    known = known_rate(3.0, 0.25)
    for transfer_s in (0.05, 0.25, 0.5):
        for policy, beta in (
            (PlacementPolicy.DM, 1.0),
            (PlacementPolicy.DMDA, 1.0),
            (PlacementPolicy.DMDA, 0.0),
            (PlacementPolicy.HEFT, 1.0),
        ):
            scene = replace(
                two_resources(3.0, 0.25, policy, heads=(0,)),
                nodes=(0, 1),
                bus=Bus(latency_s=transfer_s),
                border_bytes=(1, 1),
                beta=beta,
            )
            played = World(scene, evenly(0.9 * known, batches)).run()
            late = highest_rate(replace(scene, prefetch=False), known, batches=batches)
            yield (
                f"| {transfer_s:g} s | {policy.value} | {beta:g} "
                f"| {highest_rate(scene, known, batches=batches):.3f} | {late:.3f} "
                f"| {fmean(played.away):.0%} | {fmean(played.latencies_s):.2f} |"
            )


def slowing_down() -> Iterator[str]:
    """From k = 3 to k = 9 at batch 100, balanced cut of k = 3, at 0.995 of the highest rate of k = 9."""
    yield "| policy | f* | before | first 20 | next 20 | next 20 | 200 after them | most waiting |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    known = known_rate(9.0, 0.25)
    for policy in (PlacementPolicy.DM, PlacementPolicy.DMDA, PlacementPolicy.HEFT):
        scene = replace(two_resources(3.0, 0.25, policy, heads=(0,)), slows_at=100, slower=3.0)
        played = World(scene, evenly(0.995 * known, 400)).run()
        away = [
            fmean(played.away[a:b]) for a, b in ((20, 100), (100, 120), (120, 140), (140, 160), (160, 360))
        ]
        cells = " | ".join(f"{share:.2f}" for share in away)
        yield f"| {policy.value} | {1 / (0.25 + 9 * 0.25):.2f} | {cells} | {played.most_waiting} |"


if __name__ == "__main__":
    main()
