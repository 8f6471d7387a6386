"""The plan of an agent without a planner: the models that its settings name, each whole."""

from collections.abc import Callable
from pathlib import Path

from stageloom.edge_agent.config import AgentConfig
from stageloom.edge_agent.executor.executors import EXECUTORS
from stageloom.edge_agent.lifecycle.states import PlanRef, RunnablePlan
from stageloom.edge_agent.store import ArtifactStore
from stageloom.shared.artifact import open_artifact
from stageloom.shared.errors import SettingError, UnpinnedShape
from stageloom.shared.importer.api import artifact_path, import_model
from stageloom.shared.importer.model_argument import ModelArgument, unpinned_in_option
from stageloom.shared.messages.control import ArtifactNeed, Origin
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.registry import scheduler
from stageloom.shared.text import counted

Progress = Callable[[str], None]


def require_names(config: AgentConfig) -> None:
    """Scheduler and executor of plans made here exist; to be asked before models take their time.

    Raises:
        SettingError: one does not.
    """
    scheduler(config.scheduler)
    if config.executor not in EXECUTORS:
        raise SettingError(
            f"there is no executor {config.executor!r}", remedy=f"choose one of {', '.join(EXECUTORS)}"
        )


def plan_alone(config: AgentConfig, store: ArtifactStore, progress: Progress) -> RunnablePlan:
    """Import the configured models and compose a plan: every model whole, in `replicas` lanes.

    Whole models, since a session over a whole model is fastest where nothing is combined; several replicas,
    since one caller of a session leaves gaps that another fills.

    Raises:
        ModelError: a file cannot be imported, or leaves dimensions open.
        StorageError: the artifacts cannot be stored.
        SettingError, PlanError: the settings allow no plan.
    """
    require_names(config)
    choices, needs = [], []
    for model in config.models:
        progress(f"importing {model.path}")
        scratch = store.directory.parent / "import"
        try:
            report = import_model(Path(model.path), shapes=model.shapes, out_dir=scratch)
        except UnpinnedShape as error:
            argument = ModelArgument(model.path, model.name, tuple(model.shapes.items()))
            raise unpinned_in_option(error, argument) from error
        artifact = open_artifact(store.adopt(artifact_path(scratch, report.digest), report.digest))
        choices.append(
            ModelChoice(
                name=model.name,
                artifact=artifact.digest,
                graph=artifact.graph,
                replicas=config.replicas,
            )
        )
        progress(f"imported {model.path} as {model.name}: {report.operators} operators")
        needs.append(ArtifactNeed(model.name, artifact.digest, artifact.size))
    plan = compose(
        choices,
        scheduler=config.scheduler,
        lanes=config.replicas,
        executor=ExecutorOptions(name=config.executor, intra_op_threads=config.intra_op_threads),
    )
    models, combined = counted(len(plan.models), "model"), counted(len(plan.combined), "combined block")
    progress(f"plan {plan.digest[:12]}: {models}, {combined}")
    return RunnablePlan(PlanRef(plan.digest, Origin.LOCAL, 1), plan.wire, tuple(needs))
