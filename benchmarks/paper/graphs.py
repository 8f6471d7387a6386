"""Graphs of the zoo, imported once and kept: an import takes longer than most of what is done with it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgpack

from benchmarks.paper.code_digest import digest_of_code
from benchmarks.paper.finding import Inputs
from benchmarks.runner import progress
from benchmarks.zoo import graphs_of
from stageloom.shared.graph import Graph, graph_from_wire, graph_to_wire


class KeptGraphs:
    """Graphs by name, in memory and in `folder`; a file is of the code that made it."""

    def __init__(
        self, folder: Path, make: Callable[[Sequence[str]], dict[str, Graph]] = graphs_of, code: str = ""
    ) -> None:
        """`code`: what stands for the code of importer and zoo; worked out where it is empty."""
        self._folder, self._make, self._code = folder, make, code
        self._known: dict[str, Graph] = {}

    def __call__(self, name: str) -> Graph:
        """The graph of a model of the zoo at full size."""
        if name not in self._known:
            self._code = self._code or digest_of_code("benchmarks.zoo")
            file = self._folder / f"{name}-{self._code}.graph"
            if not file.exists():
                progress(f"importing {name}")
                wire = msgpack.packb(graph_to_wire(self._make([name])[name]))
                self._folder.mkdir(parents=True, exist_ok=True)
                unfinished = file.with_suffix(".part")
                unfinished.write_bytes(wire)
                unfinished.rename(file)
            self._known[name] = graph_from_wire(msgpack.unpackb(file.read_bytes()))
        return self._known[name]


def zoo_graph(inputs: Inputs, name: str, batch: int = 1) -> Graph:
    """A graph of the zoo, for `batch` images at once.

    Reproductions ask for graphs here, so that the code that makes them counts in their digests.
    """
    return with_batch(inputs.graph(name), batch)


def with_batch(graph: Graph, batch: int) -> Graph:
    """The graph of `batch` images at once: weights once, everything else per image."""
    if batch == 1:
        return graph
    return replace(
        graph,
        tensors=tuple(replace(one, shape=(batch * one.shape[0], *one.shape[1:])) for one in graph.tensors),
        operators=tuple(replace(one, flop=batch * one.flop) for one in graph.operators),
    )
