"""Models with open dimensions on executors: exact on onnx in every shape, refused where shapes are pinned."""

import numpy as np
import onnxruntime
import pytest

from stageloom.edge_agent.executor.base import TimingRequest, input_problem
from stageloom.edge_agent.executor.executors import EXECUTORS
from stageloom.edge_agent.executor.onnx.cache import activation_bytes
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.engine.steps import InstanceId
from stageloom.shared.errors import ExecutorError
from stageloom.shared.importer.api import artifact_path, import_model
from stageloom.shared.plan import Member
from tests.executor.contract.schedules import StepMaker, plan_of
from tests.executor.drive import KEY, load, run
from tests.executor.installed import installed
from tests.importer.open_models import LARGEST, SMALLEST, spans_inputs, write_spans

pytestmark = pytest.mark.promise("open-dimensions")


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("spans")
    file = write_spans(folder / "spans.onnx")
    report = import_model(file, shapes=LARGEST, out_dir=folder, smallest=SMALLEST)
    return open_artifact(artifact_path(folder, report.digest))


def test_every_shape_in_range_gives_the_bits_of_the_file(spans: Artifact) -> None:
    plain = onnxruntime.InferenceSession(spans.path.with_name("spans.onnx"))
    executor = OnnxExecutor()
    bound = load(executor, plan_of([spans], [()], [[Member(0, 0, 0)]]), [spans])
    assert executor.sessions == 1
    steps = StepMaker(KEY, bound)
    shapes = [((1, 3, 8, 8), 1), ((4, 3, 64, 64), 16), ((2, 3, 17, 40), 5), ((1, 3, 64, 8), 2)]
    for number, (shape, ids) in enumerate(shapes):
        inputs = spans_inputs(shape, ids, number)
        assert not input_problem(spans.graph, inputs)
        instance = InstanceId(number)
        (made,) = run(executor, steps.step(0, {0: (instance, 1)}), {instance: [inputs]})[instance]
        wanted = dict(zip(("maps", "means", "rows"), plain.run(None, inputs), strict=True))
        assert made.keys() == wanted.keys()
        assert all(np.array_equal(made[name], wanted[name]) for name in wanted)
    executor.close()


def test_an_input_outside_the_ranges_is_named_with_them(spans: Artifact) -> None:
    inputs = spans_inputs((5, 3, 8, 8), 1)
    problem = input_problem(spans.graph, inputs)
    assert problem == "input 'x' is float32 5x3x8x8, not float32 1..4x3x8..64x8..64"


def test_it_is_timed_at_the_middle_and_its_memory_counted_at_the_largest(spans: Artifact) -> None:
    (time,) = OnnxExecutor().time_operators(spans, TimingRequest(repeats=2), lambda: True)
    assert time.runs == 2
    assert [spans.graph.middle(t) for t in spans.graph.inputs] == [(2, 3, 32, 32), (8,)]
    assert activation_bytes(spans.graph, 1) >= 4 * 4 * 3 * 64 * 64


@pytest.mark.parametrize(
    "name", [name for name in EXECUTORS if name not in ("onnx", "onnx_cuda", "torch_cuda")]
)
def test_executors_that_pin_shapes_refuse_it(name: str, spans: Artifact) -> None:
    executor = installed(name)
    with pytest.raises(ExecutorError, match=f"has open dimensions, which the {name} executor does not run"):
        load(executor, plan_of([spans], [()], [[Member(0, 0, 0)]]), [spans])
    executor.close()
