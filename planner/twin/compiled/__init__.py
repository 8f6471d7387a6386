"""The twin compiled: `stageloom.planner.twin.reference` step by step, on arrays, hundreds of times as fast.

Import `stageloom.planner.twin.compiled.twin` where it is used: it imports numba, which the planner starts
without.
"""

from collections.abc import Sequence

from stageloom.planner.cluster.priority import LOWEST, come_after
from stageloom.planner.twin.compiled.compile_cache import MARK, SCALES, cache_folder


def compile_ahead(scales: Sequence[int] = SCALES) -> None:
    """Compile what is not kept yet, in a process of its own, behind all else that the machine does."""
    come_after(LOWEST)
    from stageloom.planner.twin.compiled.twin import compile_kernels

    for scale in scales:
        compile_kernels(scale)
    (cache_folder() / MARK).touch()
