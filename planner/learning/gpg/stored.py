"""A training of gpg from what the planner's store knows: its models, and the costs of a device's class."""

import time
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from stageloom.planner.costs.measured import device_costs
from stageloom.planner.learning.gpg.curves import rows
from stageloom.planner.learning.gpg.lessons import CostsOf, Drawing, analytic_costs
from stageloom.planner.learning.gpg.trainer import GpgResult, GpgSettings, Trainer, train
from stageloom.planner.learning.kept_run import begun_with, held_run, keep_begun_with
from stageloom.planner.learning.messages import Tell, Trained, TrainingStep
from stageloom.planner.schema.policy import MODELS_MAX
from stageloom.planner.schema.training import GpgTrainingReply, GpgTrainingRequest
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.machines import machine_of, usual_executor
from stageloom.planner.store.models import named_models, newest_models
from stageloom.planner.store.store import ReadStore
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.policy.gpg.checkpoint import decode
from stageloom.shared.search.costs import CostTable

STATE_FILE: Final = "run.pt"
_EVERY_S: Final = 0.25  # between two tellings


def train_stored(store: ReadStore, request: GpgTrainingRequest, tell: Tell) -> Trained:
    """Begin a training, or go on with it; to its end, the budget's, or SIGINT.

    Raises:
        InputError: there are no models, no such model or device, or its class measured nothing of them.
        RefusedError: the same training runs already.
    """
    tell(TrainingStep(text="reading models and costs"))
    graphs, names = _models(store, request.models)
    table, device_class = _costs(store, request.device, list(graphs))
    settings = GpgSettings(
        seed=request.seed, imitation_steps=request.imitation_steps, episodes=request.episodes
    )
    about: dict[str, Any] = {
        "policy": "gpg",
        "models": sorted(graphs),
        "costs": device_class,
        "members_max": request.members_max,
        "settings": settings.plain(),
    }
    follower = _Follower(tell)
    with held_run(store.data_dir, about) as folder:
        if table is not None:
            table = _as_begun(folder, table)
        found = train(
            Drawing(dict(sorted(graphs.items())), _costs_of(table), request.members_max),  # as in `about`
            settings,
            names=names,
            costs=device_class or "analytic",
            on_step=follower,
            time_limit_s=request.budget_s,
            state=folder / STATE_FILE,
        )
    left = _result(found, device_class, follower.began)
    return left if found.ended == "interrupted" else structs.replace(left, run=str(folder))


def _result(found: GpgResult, device_class: str, began: int | None) -> Trained:
    provenance = dict(decode(found.checkpoint).provenance)
    reply = GpgTrainingReply(
        checkpoint=digest_bytes([found.checkpoint]),
        ended=found.ended,
        train_s=found.train_s,
        steps=found.steps,
        resumed_steps=found.steps if began is None else began,
        validation_ratio=provenance["validation_ratio"],
        costs=provenance["costs"],
        models=provenance["models"],
        settings=provenance["settings"],
        versions=provenance["versions"],
        curves=found.history,
    )
    return Trained(
        policy="gpg",
        device_class=device_class,
        checkpoint=found.checkpoint,
        provenance=provenance,
        curves=rows(found.history),
        gpg=reply,
    )


def _models(store: ReadStore, wanted: tuple[str, ...]) -> tuple[dict[Digest, Graph], dict[Digest, str]]:
    """Graphs and names by digest."""
    infos = store.read(named_models, list(wanted) or store.read(newest_models, MODELS_MAX))
    if not infos:
        raise InputError(
            "the planner has no models to learn from", remedy="add some with `stageloom model add`"
        )
    return {info.digest: store.graph(info.digest) for info in infos}, {
        info.digest: info.model for info in infos
    }


def _as_begun(folder: Path, table: CostTable) -> CostTable:
    """The costs that the run in a folder began with; it begins with `table` where they are not known."""
    earlier: CostTable | None = begun_with(folder) if (folder / STATE_FILE).exists() else None
    if earlier is not None:
        return earlier
    (folder / STATE_FILE).unlink(missing_ok=True)
    keep_begun_with(folder, table)
    return table


def _costs_of(table: CostTable | None) -> CostsOf:
    return analytic_costs if table is None else lambda members, random: table.for_members(members)


def _costs(
    store: ReadStore, device: DeviceId | None, artifacts: list[Digest]
) -> tuple[CostTable | None, str]:
    """What was measured, and the device class that it is of; neither for estimates."""
    if device is None:
        return None, ""
    device_class = store.read(device_info, device).device_class
    models = [(artifact, 1) for artifact in artifacts]
    executor = usual_executor(store.read(machine_of, device)) or ExecutorOptions()
    table = device_costs(store, device_class, executor, models, graph_of=store.graph)
    if not table.measured_s:
        raise InputError(
            f"no operator of these models was measured on {device}'s class",
            remedy=f"measure them: stageloom device profile {device}; or learn estimates without --device",
        )
    return table, device_class


class _Follower:
    """Tells how far a trainer is, now and then and at each validation."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told_s = float("-inf")
        self._validated = -1
        self.began: int | None = None
        """The step that the first one followed; None before it."""

    def __call__(self, trainer: Trainer) -> None:
        if self.began is None:
            self.began = trainer.step - 1
        now_s = time.monotonic()
        if now_s - self._told_s < _EVERY_S and len(trainer.history) == self._validated:
            return
        self._told_s, self._validated = now_s, len(trainer.history)
        figures = {"best of sequential": trainer.best_ratio} if trainer.history else {}
        steps = trainer.settings.steps
        self._tell(TrainingStep(text=trainer.phase, done=trainer.step, size=steps, figures=figures))
