"""The engine that verification runs a model in."""

from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.verify.engine_run import EngineRun
from stageloom.shared.bound import bind
from stageloom.shared.plan import QueuePlan
from stageloom.shared.search.compose import ModelChoice, compose
from tests.executor.models import artifact_of, random_inputs


def test_no_task_is_refused_however_large_all_inputs_are_together() -> None:
    model = artifact_of("squeezenet")
    choice = ModelChoice(
        name="net",
        artifact=model.digest,
        graph=model.graph,
        queue=QueuePlan(max_bytes=random_inputs(model.graph, 0)["image"].nbytes),
    )
    bound = bind(compose([choice]), {model.digest: model.graph})
    run = EngineRun(OnnxExecutor(), bound, model)
    try:
        traces = run.run([random_inputs(model.graph, seed) for seed in range(8)], None)
    finally:
        run.close()
    assert [trace.error for trace in traces] == [None] * 8
