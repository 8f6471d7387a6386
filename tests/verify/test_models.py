"""Every zoo model and every `light_*` model that the onnx package ships, under every scheduler."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import onnx
import pytest

from benchmarks import zoo
from stageloom.edge_agent.executor.base import OperatorTime, TimingRequest
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.verify.check import verify, verify_artifact
from stageloom.edge_agent.verify.report import VerifyReport
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.errors import ExitCode
from stageloom.shared.ids import Digest
from stageloom.shared.schedule import StageSchedule
from tests.executor.models import artifact_of
from tests.verify.models import imported

pytestmark = pytest.mark.more

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
SCHEDULES = ("sequential", "greedy", "ios")
LARGE = {
    *("light_bvlc_alexnet", "light_vgg19", "light_zfnet512"),  # 230 to 550 MB of weights once folded
    *("light_densenet121", "light_inception_v1", "light_inception_v2", "light_resnet50"),  # 5 to 20 s each
}


def light_models() -> Iterator[object]:
    for path in sorted(LIGHT.glob("light_*.onnx")):
        yield pytest.param(path, id=path.stem, marks=[pytest.mark.full] if path.stem in LARGE else [])


def agrees(report: VerifyReport) -> None:
    print(report.to_text())  # noqa: T201 - what a failure is judged by
    assert report.exit_code is ExitCode.OK
    assert report.difference <= 1e-4
    assert report.sensitivity > 1e-2


@pytest.mark.promise("verify-agrees-nine-light")
def test_the_onnx_package_ships_nine_light_models() -> None:
    assert len(list(LIGHT.glob("light_*.onnx"))) == 9


@pytest.mark.promise("verify-agrees-nine-light")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", list(light_models()))
def test_light_model_agrees_under_both_schedulers(path: Path, tmp_path: Path) -> None:
    artifact = imported(path, tmp_path)
    for schedule in SCHEDULES:
        report = verify_artifact(artifact, schedule, OnnxExecutor(), repeats=2)
        agrees(report)
        assert report.seeded_weights > 10


def quarter_width() -> Iterator[object]:
    for name in zoo.ZOO:
        for schedule in SCHEDULES:
            # Of every network one schedule; of few operators and of the widest branches, all.
            slow = schedule != "greedy" and name not in ("squeezenet_bypass", "googlenet")
            yield pytest.param(name, schedule, marks=[pytest.mark.full] if slow else [])


@pytest.mark.promise("verify-agrees-nine-light")
@pytest.mark.parametrize(("name", "schedule"), list(quarter_width()))
def test_zoo_model_of_quarter_width_agrees_under_both_schedulers(name: str, schedule: str) -> None:
    agrees(verify_artifact(artifact_of(name), schedule, OnnxExecutor(), repeats=3))


@pytest.mark.promise("verify-agrees-nine-light")
@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_zoo_model_of_full_size_agrees(name: str, schedule: str, tmp_path: Path) -> None:
    zoo.write(name, tmp_path / "model.onnx")
    agrees(verify(tmp_path / "model.onnx", schedule))


class Watched(OnnxExecutor):
    """Keeps what it timed and was given to run."""

    def __init__(self) -> None:
        super().__init__()
        self.timed: list[tuple[OperatorTime, ...]] = []
        self.groups: list[int] = []  # of every stage

    def time_operators(
        self, artifact: Artifact, request: TimingRequest, idle: Callable[[], bool]
    ) -> tuple[OperatorTime, ...]:
        self.timed.append(super().time_operators(artifact, request, idle))
        return self.timed[-1]

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        schedules = [block.schedule for block in bound.plan.combined]
        self.groups += [
            len(stage.groups) for one in schedules if isinstance(one, StageSchedule) for stage in one.stages
        ]
        super().load(key, bound, artifacts)


def test_ios_is_checked_on_operators_timed_here_with_groups_side_by_side() -> None:
    executor = Watched()
    artifact = artifact_of("googlenet")
    agrees(verify_artifact(artifact, "ios", executor, repeats=1))
    (times,) = executor.timed
    assert len(times) == len(artifact.graph.operators)
    assert all(time.runs and time.median_us > 0 for time in times)
    assert max(executor.groups) > 1


def test_schedulers_that_read_no_costs_are_not_made_to_wait_for_them() -> None:
    executor = Watched()
    agrees(verify_artifact(artifact_of("squeezenet"), "greedy", executor, repeats=1))
    assert executor.timed == []


def test_borders_of_the_papers_are_compared() -> None:
    report = verify_artifact(artifact_of("inception_v3"), "greedy", OnnxExecutor(), repeats=1)
    assert (report.partition, report.blocks, report.tensors) == ("paper", 13, 14)
