"""The plan of an agent without a planner: the models that its settings name, each whole."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stageloom.edge_agent.config import AUTO, AgentConfig
from stageloom.edge_agent.executor.executors import EXECUTORS, added_executors
from stageloom.edge_agent.executor_choice import GPU_PRECISIONS, ExecutorTimes, OwnModels
from stageloom.edge_agent.machine.control_groups import has_own_cores, usable_cores
from stageloom.edge_agent.machine.executors import usable_on_gpu
from stageloom.edge_agent.store import ArtifactStore
from stageloom.shared.artifact import open_artifact
from stageloom.shared.errors import ExtensionError, SettingError, UnpinnedShape
from stageloom.shared.importer.api import artifact_path, import_model
from stageloom.shared.importer.model_argument import ModelArgument, dims_between, unpinned_in_option
from stageloom.shared.messages.control import ArtifactNeed
from stageloom.shared.plan import MAX_LANES, ExecutorOptions, Plan
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.registry import require_scheduler
from stageloom.shared.text import counted

Progress = Callable[[str], None]
_log = logging.getLogger(__name__)


def require_names(config: AgentConfig) -> None:
    """The executor exists, and the scheduler and precision where plans made here have them; to be asked
    before models take their time, and before a planner is told of the executor.

    Raises:
        SettingError: one does not.
        ExtensionError: plans made here need one of another distribution that cannot be used.
    """
    if config.models and config.executor != AUTO:
        require_scheduler(config.scheduler)
    names = (AUTO, *EXECUTORS)
    if config.executor not in names:
        try:
            added_executors().named(config.executor, "executor", names)
        except ExtensionError as error:
            if config.models:
                raise
            _log.warning("the executor of the settings cannot be used: %s", error)  # and the planner is told
    own = config.models and config.executor == AUTO  # a plan from elsewhere may need no GPU
    if own and config.precision in GPU_PRECISIONS and not usable_on_gpu():
        raise SettingError(
            f"executors on a GPU know the precision {config.precision!r}, and none can be used here",
            remedy="use fp32 or bf16; `stageloom-agent doctor` says what the GPU lacks",
        )


def own_models(config: AgentConfig, store: ArtifactStore, progress: Progress) -> OwnModels:
    """Import the configured models.

    Raises:
        ModelError: a file cannot be imported, or leaves dimensions open.
        StorageError: the artifacts cannot be stored.
        SettingError: the settings allow no plan.
    """
    require_names(config)
    choices, needs = [], []
    for model in config.models:
        progress(f"importing {model.path}")
        scratch = store.directory.parent / "import"
        try:
            report = import_model(
                Path(model.path), shapes=model.shapes, out_dir=scratch, smallest=model.smallest
            )
        except UnpinnedShape as error:
            dims = {name: dims_between(model.smallest.get(name, s), s) for name, s in model.shapes.items()}
            argument = ModelArgument(model.path, model.name, tuple(dims.items()))
            raise unpinned_in_option(error, argument) from error
        artifact = open_artifact(store.adopt(artifact_path(scratch, report.digest), report.digest))
        choices.append(ModelChoice(name=model.name, artifact=artifact.digest, graph=artifact.graph))
        progress(f"imported {model.path} as {model.name}: {counted(report.operators, 'operator')}")
        if report.never_ran:
            _log.warning("model %r: %s", model.name, report.never_ran)
        needs.append(ArtifactNeed(model.name, artifact.digest, artifact.size, model.version))
    own = has_own_cores()
    return OwnModels(tuple(choices), tuple(needs), usable_cores(), precision=config.precision, pinned=own)


def first_plan(config: AgentConfig, models: OwnModels, times: ExecutorTimes, progress: Progress) -> Plan:
    """The plan to begin with: the best that is known, or the one that the settings describe.

    Whole models, since a session over a whole model is fastest where nothing is combined; several replicas,
    since one caller of a session leaves gaps that another fills.

    Raises:
        PlanError: the settings allow no plan.
    """
    if config.executor == AUTO:
        plan = models.best(times)
    else:
        plan = compose(
            [replace(one, replicas=config.replicas) for one in models.choices],
            scheduler=config.scheduler,
            lanes=min(config.replicas, MAX_LANES),
            executor=ExecutorOptions(
                name=config.executor,
                intra_op_threads=config.intra_op_threads,
                precision=config.precision,
            ),
        )
    parts, combined = counted(len(plan.models), "model"), counted(len(plan.combined), "combined block")
    progress(f"plan {plan.digest[:12]}: {parts}, {combined}, {counted(plan.lanes, 'lane')}")
    return plan
