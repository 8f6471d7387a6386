"""The executor that computes nothing: what it refuses."""

import pytest

from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.shared.engine.steps import InstanceId
from stageloom.shared.errors import ExecutorError
from stageloom.shared.plan import Member
from tests.executor.contract.schedules import StepMaker, plan_of
from tests.executor.drive import KEY, halves, load
from tests.executor.models import artifact_of, random_inputs


def test_null_refuses_what_a_backend_would_get_wrong() -> None:
    model = artifact_of("squeezenet")
    null = NullExecutor()
    bound = load(null, plan_of([model], [halves(model)], [[Member(0, 0, 0)], [Member(0, 0, 1)]]), [model])
    steps = StepMaker(KEY, bound)
    one = InstanceId(1)
    with pytest.raises(ExecutorError, match="without its inputs"):
        null.issue(steps.step(0, {0: (one, 1)}), {})
    first, second = steps.step(0, {0: (one, 1)}), steps.step(0, {0: (one, 1)})
    null.issue(second, {one: [random_inputs(model.graph, 1)]})
    with pytest.raises(ExecutorError, match="out of order"):
        null.issue(first, {one: [random_inputs(model.graph, 1)]})
    early = steps.step(1, {0: (InstanceId(2), 1)})
    null.issue(early, {})
    with pytest.raises(ExecutorError, match="is before block 0, not 1"):
        null.wait(early.id)
