"""A contest whose contestants hang, for tests that interrupt it.

`python -m tests.bench.interrupted_contest WHERE`. `start`: contestants never become ready. `stop`: Ctrl-C
comes while they wait suspended, and they do not end. Each that hangs prints a line first.
"""

import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stageloom.edge_agent.bench.contest import Contest, ContestLoad
from stageloom.edge_agent.bench.contestant import Ended, TimedTask
from stageloom.edge_agent.bench.model_files import Feeds, ModelUnderTest
from stageloom.shared.graph import Tensor
from stageloom.shared.ids import Digest


@dataclass(frozen=True)
class Hanging:
    """The setting, and the contestant: it answers at once."""

    name: str
    where: str
    measures = False

    def make(self, models: Sequence[ModelUnderTest]) -> "HangingContestant":
        return HangingContestant(self)


class HangingContestant:
    def __init__(self, setting: Hanging) -> None:
        self._setting = setting

    def start(self, ended: Ended) -> None:
        self._ended = ended
        self._hang("start")

    def submit(self, task: TimedTask, feeds: Feeds) -> None:
        self._ended(task, True)

    def stop(self) -> None:
        self._hang("stop")

    def _hang(self, where: str) -> None:
        if where == self._setting.where:
            sys.stdout.write(f"{where}\n")
            sys.stdout.flush()
            threading.Event().wait()


def main(where: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where a shell began us with `&`
    model = ModelUnderTest("net", Path(), Path(), Digest(""), (Tensor("x", "float32", (1,)),))
    load = ContestLoad(weights=(1.0,), deadlines_s=(1.0,))
    with Contest([model], load, lambda line: None) as contest:
        contest.enter([Hanging("a", where), Hanging("b", where)])
        signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    main(sys.argv[1])
