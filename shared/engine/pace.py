"""What the rest of a task takes at the least, learned from the steps that end.

A task that can no longer end before its deadline takes the time of those that can. The estimate must not be
too long: tasks would be given up that were in time. So it follows short steps at once, and long ones, which
may have been held up by something else, by a quarter of the way. A task that never had the time by
the estimate is tried while nothing else would get the lane: so an estimate that has become wrong is mended.
"""

from typing import Final

UPWARDS: Final = 0.25
DOUBT: Final = 0.99


class Pace:
    """One model's seconds per block, whole and from each block on; 0 where no step has ended yet."""

    __slots__ = ("least_s", "rest_s")

    def __init__(self, blocks: int) -> None:
        self.least_s = [0.0] * blocks
        self.rest_s = [0.0] * (blocks + 1)
        """From each block to the end; 0 behind the last one. [num_blocks + 1]"""

    def note(self, block: int, seconds: float) -> None:
        """A step that ran the block took so long."""
        known_s = self.least_s[block]
        if 0.0 < known_s < seconds:
            seconds = known_s + UPWARDS * (seconds - known_s)
        self.least_s[block] = seconds
        self._add_up(block)

    def doubt(self) -> None:
        """A task was given up that had too little time from the start: where all have, one must run at times.

        Else an estimate that has become wrong would never be corrected.
        """
        self.least_s = [DOUBT * one for one in self.least_s]
        self._add_up(len(self.least_s) - 1)

    def _add_up(self, last: int) -> None:
        """The sums that changes up to the block `last` are in."""
        for block in range(last, -1, -1):
            self.rest_s[block] = self.least_s[block] + self.rest_s[block + 1]
