"""Models and their versions, and two versions beside each other."""

from collections import Counter
from typing import NamedTuple

from stageloom.planner.api import routes
from stageloom.planner.api.page.visit import Rendered, Visit
from stageloom.planner.schema.model import ModelDetail, ModelListRequest, ModelShowRequest
from stageloom.shared.errors import InputError, StageloomError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import TensorId


class VersionFacts(NamedTuple):
    """One version as the comparison shows it; `missing`: why what is inside it is not known."""

    name: str
    detail: ModelDetail
    inputs: list[str]
    outputs: list[str]
    kinds: Counter[str]
    missing: str


def models(visit: Visit) -> Rendered:
    """Every version of every model."""
    page = visit.ask(routes.MODEL_LIST, ModelListRequest, after=visit.query.get("after", ""), limit=100)
    return Rendered("models.html", {"models": page.items, "next": page.next})


def compare(visit: Visit) -> Rendered:
    """Two versions, or models, side by side."""
    names = [visit.query.get(side, "").strip() for side in ("a", "b")]
    if not all(names):
        raise InputError("a comparison needs two versions", remedy="choose two on the page of models")
    first, second = (_facts(visit, name) for name in names)
    kinds = sorted({*first.kinds, *second.kinds})
    return Rendered("compare.html", {"a": first, "b": second, "kinds": kinds})


def _facts(visit: Visit, name: str) -> VersionFacts:
    detail = visit.ask(routes.MODEL_SHOW, ModelShowRequest, model=name)
    title = f"{detail.info.model}@{detail.info.version}"
    try:
        graph = visit.api.reader.graph(detail.info.digest)
    except StageloomError as error:
        return VersionFacts(title, detail, [], [], Counter(), error.cause)
    return VersionFacts(
        title,
        detail,
        [_tensor(graph, tensor) for tensor in graph.inputs],
        [_tensor(graph, tensor) for tensor in graph.outputs],
        Counter(operator.kind for operator in graph.operators),
        "",
    )


def _tensor(graph: Graph, number: TensorId) -> str:
    tensor = graph.tensors[number]
    shape = " \N{MULTIPLICATION SIGN} ".join(map(str, tensor.shape)) or "scalar"
    return f"{tensor.name}: {tensor.dtype} {shape}"
