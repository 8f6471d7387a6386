"""Random launch lists, and every order in which a device may run one."""

import random
from collections.abc import Iterator, Sequence

from stageloom.shared.launch_list import Item


def random_items(rng: random.Random, count: int, streams: int, waits: int = 2) -> tuple[Item, ...]:
    """Items in issue order with random streams and waits; item i runs 1 to 3 operators."""
    items: list[Item] = []
    operator = 0
    for index in range(count):
        stream = rng.randrange(streams)
        others = [i for i in range(index) if items[i].stream != stream]
        chosen = tuple(sorted(rng.sample(others, min(len(others), rng.randint(0, waits)))))
        size = rng.randint(1, 3)
        items.append(Item(0, tuple(range(operator, operator + size)), stream, chosen, index))
        operator += size
    return tuple(items)


def all_runs(items: Sequence[Item], counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every order in which the launches may begin and end, one at a time, numbered item by item.

    Two launches can overlap exactly if some run has them in one order and some in the other.
    """
    starts = [sum(counts[:i]) for i in range(len(items))]
    queues: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        queues.setdefault(item.stream, []).append(index)

    def go(done: tuple[int, ...], progress: dict[int, tuple[int, int]]) -> Iterator[tuple[int, ...]]:
        ended = {i for stream, (at, _) in progress.items() for i in queues[stream][:at]}
        open_streams = [s for s, (at, _) in progress.items() if at < len(queues[s])]
        if not open_streams:
            yield done
        for stream in open_streams:
            at, within = progress[stream]
            item = queues[stream][at]
            if not set(items[item].waits) <= ended:
                continue
            following = (at, within + 1) if within + 1 < counts[item] else (at + 1, 0)
            yield from go((*done, starts[item] + within), {**progress, stream: following})

    yield from go((), {stream: (0, 0) for stream in queues})


def random_run(items: Sequence[Item], counts: Sequence[int], rng: random.Random) -> list[int]:
    """One such order, drawn at random."""
    starts = [sum(counts[:i]) for i in range(len(items))]
    queues: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        queues.setdefault(item.stream, []).append(index)
    ended: set[int] = set()
    within = [0] * len(items)
    order: list[int] = []
    while any(queues.values()):
        ready = [q[0] for q in queues.values() if q and set(items[q[0]].waits) <= ended]
        chosen = rng.choice(ready)
        order.append(starts[chosen] + within[chosen])
        within[chosen] += 1
        if within[chosen] == counts[chosen]:
            ended.add(chosen)
            queues[items[chosen].stream].pop(0)
    return order
