"""How steps of different lanes share a device: processor sharing with one constant for interference.

A step that runs alone takes t seconds and uses the share u in (0, 1] of the device. While k steps with shares
u_1..u_k run, each of them advances at the rate 1 / s,

    s = least + c (k - least),    least = max(u_1 + ... + u_k, 1),

so that what takes t seconds alone takes t s. `least` is processor sharing (Kleinrock 1967): a device that is
not full slows nobody down, a full one is divided. c is the device's interference: 0, steps cost each other
nothing while there is room; 1, they take as long as one after another; more, they are better kept apart. It
is the formula of the groups of a stage (`stageloom.shared.search.costs`), one level up, so a plan is priced
alike wherever it puts its parallelism.

What steps cost each other beyond that does not depend on how long they are: an interpreter's lock that both
need to begin and to end, a driver's queue. Each step is longer by `DeviceFile.beside_s` for every step that
runs in another lane when it begins.

Two steps of t seconds at u = 1 and c = 0 that begin d < t apart end at 2t - d and 2t, counted from the first.
"""

from collections.abc import Collection, Iterable


def slowdown(shares: Collection[float], interference: float) -> float:
    """How many times as long each of the running steps takes as alone; 1 where at most one runs."""
    running = len(shares)
    if running < 2:
        return 1.0
    least = max(added_up(shares), 1.0)
    return least + interference * (running - least)


def added_up(values: Iterable[float]) -> float:
    """The sum of floats, one after another, as the kernels of the compiled twin add them.

    Python's own `sum` makes up for rounding from 3.12 on, so its bits depend on the Python.
    """
    total = 0.0
    for value in values:
        total += value
    return total
