"""Tiny ONNX models with outputs that depend on every input value, and plans for them."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stageloom.edge_agent.lifecycle.statefile import save_state
from stageloom.edge_agent.lifecycle.states import LinkState, PlanRef, Proven, RunnablePlan
from stageloom.edge_agent.link.factory import STATE_NAME
from stageloom.edge_agent.store import ArtifactStore
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.importer.api import artifact_path, import_model
from stageloom.shared.messages.control import Activation, ArtifactNeed, Desired, DeviceState, Origin
from stageloom.shared.plan import ExecutorOptions, QueuePlan
from stageloom.shared.search.compose import ModelChoice, compose

ROW_SHAPE = (1, 3, 8, 8)


def write_tiny(path: Path, seed: int = 0) -> Path:
    """Conv, Relu: `input` to `output`, both 1x3x8x8."""
    weights = np.random.default_rng(seed).normal(size=(3, 3, 3, 3)).astype(np.float32) / 3
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["input", "w"], ["c"], kernel_shape=[3, 3], pads=[1] * 4),
            helper.make_node("Relu", ["c"], ["output"]),
        ],
        "tiny",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ROW_SHAPE)],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ROW_SHAPE)],
        [numpy_helper.from_array(weights, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def import_tiny(directory: Path, seed: int = 0) -> Artifact:
    """Import it into an artifact store."""
    directory.mkdir(parents=True, exist_ok=True)
    return import_file(write_tiny(directory / f"tiny{seed}.onnx", seed), directory)


def import_file(file: Path, directory: Path) -> Artifact:
    """Import an ONNX file into an artifact store."""
    report = import_model(file, shapes={}, out_dir=directory)
    return open_artifact(
        ArtifactStore(directory).adopt(artifact_path(directory, report.digest), report.digest)
    )


def plan_for(
    models: dict[str, Artifact],
    *,
    executor: str = "onnx",
    replicas: int = 1,
    queue: QueuePlan | None = None,
    interval_us: int = 0,
    partition: str = "whole",
    lanes: int = 1,
    origin: Origin = Origin.PLANNER,
) -> RunnablePlan:
    """Sequential, by default every model whole."""
    plan = compose(
        [
            ModelChoice(
                name=name,
                artifact=artifact.digest,
                graph=artifact.graph,
                replicas=replicas,
                partition=partition,
                queue=queue or QueuePlan(),
                launch_interval_us=interval_us,
                work_conserving=not interval_us,
            )
            for name, artifact in models.items()
        ],
        lanes=lanes,
        executor=ExecutorOptions(name=executor),
    )
    needs = tuple(ArtifactNeed(name, artifact.digest, artifact.size) for name, artifact in models.items())
    return RunnablePlan(PlanRef(plan.digest, origin), plan.wire, needs)


def desire(plan: RunnablePlan, generation: int = 1, activation: Activation = Activation.TRIAL) -> Desired:
    """What a planner would send."""
    return Desired(
        epoch=1,
        generation=generation,
        plan_digest=plan.ref.digest,
        plan=plan.wire,
        artifacts=plan.artifacts,
        activation=activation,
    )


def write_state(
    home: Path,
    *,
    good: RunnablePlan | None = None,
    desired: RunnablePlan | None = None,
    activation: Activation = Activation.TRIAL,
    proven: tuple[Proven, ...] = (),
) -> None:
    """The link's state as a device left it: last-known-good, and a desired plan it has just received."""
    state = LinkState(
        last_good=good,
        active=good.ref if good else None,
        desired=desire(desired, activation=activation) if desired else None,
        proven=proven,
        state=DeviceState.RECEIVED if desired else None,
    )
    save_state(home / STATE_NAME, state)
