"""Small plans over chains, for tests that work out by hand what must happen."""

from collections.abc import Mapping, Sequence

from stageloom.shared.bound import BoundPlan
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Member, ModelPlan
from tests.engine.generate import chain, digest, members_of, plan_of


def models_of(blocks: Sequence[int], **fields: object) -> list[ModelPlan]:
    """Models a, b, c... with so many blocks of one operator each; `fields` go to all of them."""
    return [
        ModelPlan(
            name="abcdef"[index],
            artifact=digest(index),
            cuts=tuple(range(1, count)),
            **fields,  # type: ignore[arg-type]
        )
        for index, count in enumerate(blocks)
    ]


def graphs_of(models: Sequence[ModelPlan]) -> dict[Digest, Graph]:
    """Chains that fit the models' cuts, with one operator per block."""
    return {model.artifact: chain(model.name, model.num_blocks) for model in models}


def chains(
    *blocks: int,
    groups: Sequence[Sequence[tuple[int, int, int]]] | None = None,
    fields: Mapping[str, object] | None = None,
    **rules: object,
) -> BoundPlan:
    """A plan over chains; `groups` are the combined blocks' members, by default one each."""
    models = models_of(blocks, **(fields or {}))
    return with_models(models, groups, **rules)


def with_models(
    models: Sequence[ModelPlan],
    groups: Sequence[Sequence[tuple[int, int, int]]] | None = None,
    **rules: object,
) -> BoundPlan:
    """The same for given models."""
    if groups is None:
        chosen = [[member] for member in members_of(models)]
    else:
        chosen = [[Member(*member) for member in group] for group in groups]
    return plan_of(models, chosen, graphs_of(models), **rules)
