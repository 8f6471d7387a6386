"""The forward pass: torch's and the plain one, renewed leaves and the whole anew, and what it reads."""

from random import Random

import numpy as np
import pytest
import torch

from stageloom.planner.learning.gpg.lessons import BlockRows, StateRows
from stageloom.planner.learning.gpg.losses import batch_of
from stageloom.planner.learning.gpg.model import GpgModel
from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.policy.gpg.network import (
    OPERATOR_FEATURES,
    PAPER_FEATURES,
    EncodedBlock,
    bit_rows,
    levels,
    measures,
    operator_rows,
    state_rows,
)
from stageloom.shared.search.costs import StageCosts
from tests.learning.cases import block, network
from tests.search.graphs import CHAIN, DIAMOND, union


@pytest.fixture
def model() -> GpgModel:
    torch.manual_seed(3)
    return GpgModel()


def states(graph: CombinedGraph, count: int = 12) -> list[int]:
    """Random sets closed under predecessors, all operators and none among them."""
    random = Random(1)
    found = [(1 << graph.size) - 1, 0]
    for _ in range(count):
        mask = 0
        for op in range(random.randint(1, graph.size)):
            mask |= 1 << op
        for op in reversed(range(graph.size)):
            if mask >> op & 1 and not graph.successors[op] & mask and random.random() < 0.3:
                mask ^= 1 << op
        found.append(mask)
    return found


def test_an_actor_that_is_very_sure_answers_with_one_end_and_no_warning(model: GpgModel) -> None:
    graph, costs = block(2, 0)
    for sure, wanted in ((-1000.0, 0.0), (1000.0, 1.0)):
        with torch.no_grad():
            list(model.actor.parameters())[-1].fill_(sure)
        found = EncodedBlock(network(model), graph, costs).actions([(1 << graph.size) - 1])
        assert found.tolist() == pytest.approx([wanted], abs=1e-5)


@pytest.mark.promise("learned-policy-features-paper")
def test_the_plain_forward_pass_equals_torchs(model: GpgModel) -> None:
    graphs = [block(2, seed) for seed in range(3)]
    parts, wanted_actions, wanted_values = [], [], []
    for graph, costs in graphs:
        rows = BlockRows.of(graph, costs)
        masks = states(graph)
        parts.append((rows, StateRows.of(rows, masks)))
        encoded = EncodedBlock(network(model), graph, costs)
        wanted_actions.append(encoded.actions(masks))
        wanted_values.append(encoded.values(masks))
    with torch.no_grad():
        seen = model.see(batch_of(parts))  # all blocks in one batch
        actions, values = model.act(seen).numpy(), model.worth(seen).numpy()
    assert actions == pytest.approx(np.concatenate(wanted_actions), abs=2e-6)
    assert values == pytest.approx(np.concatenate(wanted_values), abs=2e-6)
    assert np.ptp(actions) > 1e-4  # a pass that ignored the states would agree, too


@pytest.mark.promise("learned-policy-features-paper")
def test_renewing_the_leaves_alone_equals_embedding_what_is_left_anew(model: GpgModel) -> None:
    """Equation 5 looks at predecessors only, and a state is closed under them."""
    graph, costs = block(2)
    plain = network(model)
    encoded = EncodedBlock(plain, graph, costs)
    found = measures(graph, costs)
    rows = operator_rows(graph, found)
    for state in states(graph):
        kept = list(bits(state))
        place = {op: at for at, op in enumerate(kept)}
        rest = CombinedGraph(
            (0, len(kept)),
            (0,),
            tuple(sum(1 << place[one] for one in bits(graph.predecessors[op])) for op in kept),
        )
        whole = plain.embed(rest, rows[kept])
        leaves = [at for at in range(len(kept)) if not rest.successors[at]]
        z = plain.part("h2", plain.part("g2", whole[leaves]).sum(axis=0, keepdims=True))
        seen, _ = encoded.states([state])
        assert seen[0, : z.shape[1]] == pytest.approx(z[0], abs=2e-6)


def test_levels_put_every_operator_below_its_predecessors() -> None:
    graph = union(DIAMOND, CHAIN)
    assert levels(graph) == [[0, 4], [1, 2, 5], [3, 6]]


@pytest.mark.promise("learned-policy-features-paper")
def test_the_operators_row_holds_what_the_paper_lists() -> None:
    graph, costs = block(1)
    rows = operator_rows(graph, measures(graph, costs))
    assert rows.shape == (graph.size, OPERATOR_FEATURES)
    assert PAPER_FEATURES == 8 + 4 + 3 + 2 + 2 + 2 + 1 + 5 + 5
    conv, concat = rows[1], rows[6]
    assert conv[:8].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]  # (i) type
    assert concat[:8].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert concat[8] > conv[8] and concat[11] == 0.75  # (ii) channels of all inputs, and how many there are
    assert conv[15:21].tolist() == [0.125, 0.125, 0.375, 0.375, 0.125, 0.125]  # (iv) to (vi)
    assert conv[21] == pytest.approx(0.1 * np.log(2.0))  # (vii) one group
    assert conv[22:27].tolist() == [0, 1, 0, 0, 0]  # (viii) relu
    assert concat[22:27].tolist() == [1, 0, 0, 0, 0]
    assert conv[27:32].tolist() == [1, 0, 0, 0, 0]  # (ix) no pooling


def test_a_device_twice_as_fast_shows_the_same() -> None:
    graph, costs = block(2)
    half = StageCosts(
        tuple(one / 2 for one in costs.operators_s),
        costs.contention,
        costs.barrier_s / 2,
        work_s=tuple(one / 2 for one in costs.work_s),
    )
    full, halved = measures(graph, costs), measures(graph, half)
    assert operator_rows(graph, halved) == pytest.approx(operator_rows(graph, full), rel=1e-5)


def test_the_states_row_begins_with_what_is_left_and_the_least_it_can_take() -> None:
    graph = union(DIAMOND)
    costs = StageCosts((1.0, 2.0, 4.0, 1.0), contention=0.25)
    left = bit_rows([0b1111, 0b0111, 0b0001, 0], 4)
    leaves = bit_rows([0b1000, 0b0110, 0b0001, 0], 4)
    rows = state_rows(measures(graph, costs), left, leaves)
    assert rows[:, 0] == pytest.approx([1.0, 7 / 8, 1 / 8, 0.0])
    assert rows[:, 1] == pytest.approx([6 / 8, 5 / 8, 1 / 8, 0.0])


def test_nothing_left_takes_no_time(model: GpgModel) -> None:
    graph, costs = block(1)
    assert EncodedBlock(network(model), graph, costs).values([0]).tolist() == [0.0]
