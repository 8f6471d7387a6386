"""Variants that plain torch offers: eager, one captured stream, batches, several streams, one joint graph."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from benchmarks.gpu.device import STREAMS, Device, Graph, Work, fork, join
from benchmarks.gpu.networks import Network, Subject
from benchmarks.gpu.rounds import Variant
from stageloom.edge_agent.lowering.dtypes import use_tf32

MIX: Final = "mix"
EAGER: Final = "torch eager"
GRAPH: Final = "torch graph"
AGAIN: Final = "torch graph, again"
IN_TURN: Final = "torch graphs in turn"
IN_TURN_AGAIN: Final = "torch graphs in turn, again"
JOINT: Final = "torch joint graph"
_RUNS_PER_INSTANCE: Final = 4
_STREAMS_APART: Final = 5  # the first streams of two subjects


class Instance:
    """One copy of a network that can run beside others: own weights' views, own input, own output."""

    def __init__(self, device: Device, network: Network, images: Tensor) -> None:
        self.device = device
        self.network = network
        self.images = images
        self.logits: Tensor | None = None

    def run(self) -> None:
        """Eagerly, on the current stream."""
        with torch.inference_mode():
            self.logits = self.network(self.images)

    def captured(self, stream: int) -> Graph:
        """As a graph of its own memory pool, captured on the given one of the device's streams."""
        return self.device.capture(self.run, stream=self.device.streams[stream])


class Rows:
    """Makes the variants of some subjects in one precision; networks are shared, memory pools are not.

    The n-th instance of a subject is captured once and takes part in every variant that needs n or more.
    """

    def __init__(self, device: Device, subjects: Sequence[Subject], precision: str) -> None:
        self.device = device
        self.subjects = subjects
        self.precision = precision
        self.errors: dict[tuple[str, str], float] = {}  # of every variant's logits, by its key
        self._networks = {one.name: one.network(device.torch, precision) for one in subjects}
        self._captured: dict[str, list[tuple[Instance, Graph, int]]] = {one.name: [] for one in subjects}

    def instance(self, subject: Subject, batch: int = 1) -> Instance:
        """Weights are shared by all instances of a subject."""
        images = subject.images(self.device.torch, self.precision, batch)
        return Instance(self.device, self._networks[subject.name], images)

    def _instances(self, subject: Subject, count: int) -> list[tuple[Instance, Graph, int]]:
        """Instances with their graphs and the numbers of the streams that these were captured on.

        Up to 16 of one subject, or up to 4 of each of three, have streams of their own.
        """
        known = self._captured[subject.name]
        shift = _STREAMS_APART * self.subjects.index(subject)
        while len(known) < count:
            stream = (shift + len(known)) % STREAMS
            instance = self.instance(subject)
            known.append((instance, instance.captured(stream), stream))
        return known[:count]

    def _variant(
        self, subject: str, name: str, run: Work, of: Sequence[tuple[Subject, Instance]], units: int = 1
    ) -> Variant:
        run()
        self.device.synchronize()
        errors = [own.error_of(one.logits) for own, one in of if one.logits is not None]
        self.errors[subject, name] = max(errors, default=float("inf"))
        return Variant(subject, name, run, units, self.precision)

    def eager(self, subject: Subject) -> Variant:
        """Baseline 1."""
        instance = self.instance(subject)
        return self._variant(subject.name, EAGER, instance.run, [(subject, instance)])

    def graph(self, subject: Subject, name: str = GRAPH) -> Variant:
        """Baseline 2: the whole network on one stream as one graph."""
        ((instance, graph, _),) = self._instances(subject, 1)
        return self._variant(subject.name, name, graph.replay, [(subject, instance)])

    def batch(self, subject: Subject, size: int) -> Variant:
        """Baseline 8: `size` images at once, as a graph; time per image."""
        instance = self.instance(subject, size)
        replay = instance.captured(0).replay
        return self._variant(subject.name, batch_name(size), replay, [(subject, instance)], size)

    def streams(self, subject: Subject, count: int) -> Variant:
        """Baseline 7: `count` instances, each one graph on a stream of its own; time per image."""
        found = self._instances(subject, count)
        return self._variant(
            subject.name,
            streams_name(count),
            self._beside(found),
            [(subject, instance) for instance, _, _ in found],
            count * _RUNS_PER_INSTANCE,
        )

    def _beside(self, found: Sequence[tuple[Instance, Graph, int]]) -> Work:
        """Every graph a few times on its stream, all streams begun and ended together."""
        device = self.device
        streams = [device.streams[number] for _, _, number in found]

        def run() -> None:
            fork(device, streams)
            for _ in range(_RUNS_PER_INSTANCE):
                for stream, (_, graph, _) in zip(streams, found, strict=True):
                    with device.on(stream):
                        graph.replay()
            join(device, streams)

        return run

    # The mix: one image of every subject is one unit.

    def mix_in_turn(self, name: str = IN_TURN) -> Variant:
        """Sequential graphs, one after another on one stream: what the mix is compared with."""
        found = [(one, *self._instances(one, 1)[0]) for one in self.subjects]
        graphs = [graph for _, _, graph, _ in found]

        def run() -> None:
            for graph in graphs:
                graph.replay()

        return self._variant(MIX, name, run, [(own, instance) for own, instance, _, _ in found])

    def mix_streams(self, count: int) -> Variant:
        """`count` instances of every subject, each on its own stream, without any order among them."""
        found = [(one, each) for one in self.subjects for each in self._instances(one, count)]
        run = self._beside([each for _, each in found])
        of = [(own, each[0]) for own, each in found]
        return self._variant(MIX, streams_name(len(found)), run, of, count * _RUNS_PER_INSTANCE)

    def mix_joint(self) -> Variant:
        """One graph with a branch per subject, begun and ended together (POS)."""
        device = self.device
        instances = [self.instance(one) for one in self.subjects]
        streams = device.streams[1 : len(instances) + 1]

        def work() -> None:
            fork(device, streams)
            for stream, instance in zip(streams, instances, strict=True):
                with device.on(stream):
                    instance.run()
            join(device, streams)

        replay = device.capture(work, stream=device.streams[0]).replay
        return self._variant(MIX, JOINT, replay, list(zip(self.subjects, instances, strict=True)))


def batch_name(size: int) -> str:
    """In the table."""
    return f"torch graph, batch {size}"


def streams_name(count: int) -> str:
    """In the table."""
    return f"torch graphs on {count} streams"


def use_precision(precision: str) -> None:
    """How float32 products are taken from here on; kernels are searched for once per shape."""
    torch.backends.cudnn.benchmark = True
    if torch.cuda.is_available():
        use_tf32(precision == "tf32")
