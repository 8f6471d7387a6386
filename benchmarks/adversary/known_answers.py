"""Applications in a closed loop whose answers are known: each output is compared with the whole model's."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime

from stageloom import Client
from stageloom.shared.errors import StageloomError

TOLERANCE: Final = 1e-4
"""Norm of the difference over the norm of the reference."""

_INPUTS: Final = 16
_WINDOW: Final = 2
_PACE_S: Final = 0.005
_AGAIN_S: Final = 0.05


@dataclass(frozen=True)
class Known:
    """One model's inputs, [16] of [1, 3, side, side] float32 each, and what onnxruntime answers to them."""

    model: str
    inputs: Sequence[Any]
    answers: Sequence[Any]


def known_answers(model: str, path: Path, seed: int) -> Known:
    """Run the whole file on seeded inputs."""
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    shape = session.get_inputs()[0].shape
    rng = np.random.default_rng(seed)
    inputs = [rng.standard_normal(shape).astype(np.float32) for _ in range(_INPUTS)]
    return Known(model, inputs, [session.run(["logits"], {"image": one})[0] for one in inputs])


class Applications:
    """What became of all tasks. An agent that is away is asked again; whatever else it answers is counted."""

    def __init__(self, socket: Path, answer_s: float) -> None:
        """`answer_s`: a task that has not ended after so long hangs."""
        self.endings: Counter[str] = Counter()
        self.completed: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.hung: list[str] = []
        self._socket, self._answer_s = socket, answer_s
        self._ended = threading.Event()

    @contextmanager
    def submitting(self, models: Sequence[Known]) -> Iterator[None]:
        """One application per model, until the end of the block."""
        threads = [threading.Thread(target=self._live, args=(known,), daemon=True) for known in models]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join(2 * self._answer_s)
            self.hung += [
                f"application {thread.name} does not end" for thread in threads if thread.is_alive()
            ]

    def _live(self, known: Known) -> None:
        while not self._ended.is_set():
            with self._counting(), Client(self._socket) as client:
                self._loop(client, known)
            self._ended.wait(_AGAIN_S)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """An agent or a task that ends the block with an error is counted."""
        try:
            yield
        except TimeoutError:
            self.hung.append(f"a task had no answer for {self._answer_s:g} s")
        except (StageloomError, OSError) as error:
            self.endings[type(error).__name__] += 1

    def _loop(self, client: Client, known: Known) -> None:
        """Tasks over one connection, until it breaks."""
        at = 0
        while not self._ended.wait(_PACE_S):
            numbers = [number % _INPUTS for number in range(at, at + _WINDOW)]
            futures = [client.submit(known.model, {"image": known.inputs[number]}) for number in numbers]
            at += _WINDOW
            for number, future in zip(numbers, futures, strict=True):
                with self._counting():
                    self._judge(known, number, future.result(self._answer_s)["logits"])

    def _judge(self, known: Known, number: int, answer: Any) -> None:
        reference = known.answers[number]
        difference = float(np.linalg.norm(answer - reference) / np.linalg.norm(reference))
        self.completed[known.model] += 1
        if not difference <= TOLERANCE:
            self.wrong.append(f"{known.model}, input {number}: relative difference {difference:.3g}")
