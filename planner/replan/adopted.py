"""A policy trained for one device class, taken over for another, or for other weights of its models. Pure.

A policy belongs to a device class and to artifacts (`stageloom.shared.policy.maddpg.space`) and is never
asked for anything else by itself. An operator may adopt it: what it proposes must win a trial there like any
plan. It reads neither weights nor seconds, so an artifact with the same graph will do; its schedules, found
under the costs of its own class, come along.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, islice
from typing import Any, Final

from stageloom.shared.blocks import split
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.policy.maddpg.book import BlockKey, Book
from stageloom.shared.policy.maddpg.checkpoint import Checkpoint, encode
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.search.costs import combined_digest

MOST_COMBINED: Final = 200_000
"""Combined blocks whose schedules are looked for under other artifacts: some seconds."""


def adopted(found: Checkpoint, device_class: str, here: Mapping[Digest, Graph]) -> Checkpoint:
    """The policy for a device class of this planner. `here`: the artifacts that the planner has.

    Its provenance then has `adopted`: the policy's digest, device class and artifacts as they were; its
    `models` and `graphs` are of the artifacts here. The same policy comes back where nothing changes.

    Raises:
        InputError: a model of the policy is not here, nor one with the same graph.
    """
    models = tuple(
        replace(model, artifact=_here(index, model.artifact, found.provenance, here))
        for index, model in enumerate(found.space.models)
    )
    space = replace(found.space, device_class=device_class, models=models)
    if space == found.space:
        return found
    book = found.book if models == found.space.models else _moved(found.book, found.space, space, here)
    before = {
        "policy": digest_bytes([encode(found)]),
        "device_class": found.space.device_class,
        "artifacts": [model.artifact for model in found.space.models],
    }
    about = {**found.provenance, **_artifacts_of(found, space, here), "adopted": before}
    return Checkpoint(space, found.network, book, about)


def _artifacts_of(found: Checkpoint, space: Space, here: Mapping[Digest, Graph]) -> dict[str, Any]:
    """What the provenance says of artifacts, of those that are here: it can be adopted elsewhere in turn."""
    pairs = zip(found.space.models, space.models, strict=True)
    now = {before.artifact: after.artifact for before, after in pairs}
    names = found.provenance.get("models", {})
    return {
        "models": {name: now.get(artifact, artifact) for name, artifact in names.items()},
        "graphs": {artifact: here[artifact].digest for artifact in now.values()},
    }


def _here(
    index: int, artifact: Digest, provenance: Mapping[str, Any], here: Mapping[Digest, Graph]
) -> Digest:
    if artifact in here:
        return artifact
    wanted = provenance.get("graphs", {}).get(artifact)
    alike = sorted(known for known, graph in here.items() if graph.digest == wanted)
    if not alike:
        names = {known: name for name, known in provenance.get("models", {}).items()}
        raise InputError(
            f"model {index + 1} of the policy ({names.get(artifact, artifact[:12])}) is not here, nor is one "
            "that computes the same",
            remedy="import the ONNX file that it was trained with: stageloom model add",
        )
    return alike[0]


def _moved(book: Book, before: Space, after: Space, here: Mapping[Digest, Graph]) -> Book:
    """The schedules under the keys that their combined blocks have with the other artifacts."""
    keys = islice(zip(_keys(before, after, here), _keys(after, after, here), strict=True), MOST_COMBINED)
    return Book({new: book.schedules[old] for old, new in keys if old in book.schedules})


def _keys(space: Space, known: Space, here: Mapping[Digest, Graph]) -> Iterator[BlockKey]:
    """Of every combined block that the policy may make; `known` has the models as they are `here`."""
    spans = {}
    for index, (model, same) in enumerate(zip(space.models, known.models, strict=True)):
        for block in split(here[same.artifact], model.cuts):
            spans[index, block.index] = (model.artifact, block.start, block.stop)
    for size in range(1, space.members_max + 1):
        for members in combinations(space.members, size):
            batch = max(space.models[one.model].batch for one in members)
            yield combined_digest(spans[one.model, one.block] for one in members), batch
