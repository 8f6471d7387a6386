"""Where operators of an artifact may be split, by their ONNX nodes: exactly what executors run or refuse."""

from collections.abc import Sequence

import onnx

from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import Unsplittable
from stageloom.shared.ids import OpId
from stageloom.shared.importer.encoded import take_apart
from stageloom.shared.importer.node_run import node_run
from stageloom.shared.legality import Violation, split_violations
from stageloom.shared.operator_parts import SplitAxis, halves_of, split_axes
from stageloom.shared.partition import NodeRun, Split
from stageloom.shared.split_graph import split_dimension


class SplitReader:
    """Reads an artifact's ONNX part once; weights are located and not parsed."""

    def __init__(self, artifact: Artifact) -> None:
        self._graph = artifact.graph
        skeleton, self._weights = take_apart(memoryview(artifact.onnx_bytes()))
        self._model = onnx.ModelProto.FromString(skeleton)

    def nodes(self, first: int, last: int) -> NodeRun:
        """The nodes of operators `first` to `last`.

        Raises:
            Unsplittable: one of them is opaque.
        """
        ops = [OpId(op) for op in range(first, last + 1)]
        return node_run(self._model, self._graph, ops, self._weights)

    def axes(self, first: int, last: int | None = None) -> tuple[SplitAxis, ...]:
        """The axes that an operator, or a chain of them, may be split on; none where it may not."""
        last = first if last is None else last
        try:
            return split_axes(self.nodes(first, last), self._graph.operators[last].kind)
        except Unsplittable:
            return ()

    def violations(self, splits: Sequence[Split], cuts: Sequence[int] = ()) -> list[Violation]:
        """All violations of a model's splits, those included that only nodes show."""
        if found := split_violations(splits, self._graph, cuts):
            return found
        return [violation for split in splits for violation in self._by_nodes(split)]

    def _by_nodes(self, split: Split) -> list[Violation]:
        dim = split_dimension(self._graph, split) or 0
        try:
            halves_of(self.nodes(split.first, split.last), dim, split.boundary)
        except Unsplittable as error:
            return [Violation(error.rule, error.cause)]
        return []
