"""Plans that were looked at come back as they were kept, for those models and that device class."""

import pytest

from stageloom.planner.schema.explanation import EvaluationVerdict
from stageloom.planner.store.predictions import considered_plans, keep_considered
from stageloom.planner.store.store import Store
from stageloom.shared.clock import ManualClock
from tests.store.helpers import NANO, T0_US, enrol, looked_at


@pytest.mark.promise("plans-were-looked-kept")
def test_what_was_looked_at_comes_back_newest_first_for_its_models_and_class(
    store: Store, clock: ManualClock
) -> None:
    enrol(store)
    first = looked_at("a", verdict=EvaluationVerdict.TAKEN, search_s=0.5)
    second = looked_at("a", busy=None, predicted=None, verdict=EvaluationVerdict.ILLEGAL)
    store.write(keep_considered, [first, second], device_class="cpu", device=NANO, replan=3)
    clock.advance(1.0)
    anywhere = looked_at("a", how="operator", verdict=EvaluationVerdict.FOUND)
    store.write(keep_considered, [anywhere], device_class="")
    store.write(keep_considered, [looked_at("a")], device_class="gpu")
    store.write(keep_considered, [looked_at("b")], device_class="cpu")
    store.write(keep_considered, [], device_class="cpu")
    found = store.read(considered_plans, first.serves, "cpu")
    assert [evaluation for evaluation, _ in found] == [anywhere, second, first]
    assert [row.replan for _, row in found] == [None, 3, 3]
    assert [row.at_us - T0_US for _, row in found] == [1_000_000, 0, 0]
    assert len(store.read(considered_plans, first.serves, "cpu", limit=2)) == 2
