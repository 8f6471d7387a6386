"""`stageloom train`; and `stageloom train gpg`: learn to schedule the planner's models."""

import sys
import time
from typing import TYPE_CHECKING

import typer

from stageloom.planner.cli import train_options as opt
from stageloom.planner.cli.options import DatabaseUrl, DataDir, Json, data_dir_of, parse_duration
from stageloom.planner.cli.output import emit, emit_json, progress
from stageloom.planner.cli.train_maddpg import maddpg
from stageloom.shared.errors import InputError

if TYPE_CHECKING:
    from stageloom.planner.learning.gpg.lessons import CostsOf
    from stageloom.planner.learning.gpg.trainer import Trainer
    from stageloom.planner.store.reading import ReadStore
    from stageloom.shared.graph import Graph
    from stageloom.shared.ids import Digest

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Train the learned policies.")

app.command()(maddpg)

_BAR = 30


@app.callback()
def train() -> None:
    """Train the learned policies."""


@app.command()
def gpg(
    model: opt.GpgModels = None,
    device: opt.GpgDevice = "",
    imitation_steps: opt.ImitationSteps = 400,
    episodes: opt.Episodes = 300,
    members_max: opt.GpgMembersMax = 3,
    seed: opt.GpgSeed = 0,
    budget: opt.GpgBudget = "15m",
    output: opt.Output = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Train gpg on random combined blocks of the planner's models. Keeps the policy in the store.

    The planner may run; its next search with the scheduler gpg takes the new policy. Ctrl-C keeps the best so
    far. With --output a run that was interrupted goes on when the same command is given again.

    \b
    stageloom train gpg --output training
    stageloom plan create --device D --model resnet50 --scheduler gpg
    """
    from stageloom.planner.learning.gpg.lessons import Drawing
    from stageloom.planner.learning.gpg.trainer import GpgSettings, rows, to_json, to_svg
    from stageloom.planner.learning.gpg.trainer import train as run
    from stageloom.planner.store import checkpoints
    from stageloom.planner.store.reading import ReadStore
    from stageloom.shared.policy.gpg.checkpoint import decode

    if not imitation_steps + episodes:
        raise InputError("nothing to train", remedy="give --imitation-steps or --episodes")
    budget_s = parse_duration(budget, "--budget")
    store = ReadStore.open(data_dir_of(data_dir), database_url)
    try:
        graphs, names = _models(store, model)
        costs, device_class = _costs(store, device, list(graphs))
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        found = run(
            Drawing(graphs, costs, members_max),
            GpgSettings(seed=seed, imitation_steps=imitation_steps, episodes=episodes),
            names=names,
            costs=device_class or "analytic",
            on_step=_Bar(),
            time_limit_s=budget_s,
            state=output / "run.pt" if output is not None else None,
        )
        provenance = decode(found.checkpoint).provenance
        digest = checkpoints.keep(
            store.database,
            found.checkpoint,
            policy="gpg",
            device_class=device_class,
            provenance=provenance,
            curves=rows(found.history),
            now_us=time.time_ns() // 1000,
        )
    finally:
        store.close()
    if output is not None:
        (output / "curves.json").write_text(to_json(found.history), encoding="utf-8")
        (output / "curves.svg").write_text(to_svg(found.history), encoding="utf-8")
        (output / "gpg.checkpoint").write_bytes(found.checkpoint)
    if json:
        emit_json({"checkpoint": digest, "ended": found.ended, "train_s": found.train_s, **provenance})
        return
    emit(
        f"{digest[:12]}: {found.steps} steps in {found.train_s:.0f} s, ended: {found.ended}; "
        f"costs {provenance['validation_ratio']:.3f} of sequential on the validation blocks"
    )


def _models(store: "ReadStore", wanted: list[str] | None) -> "tuple[dict[Digest, Graph], dict[Digest, str]]":
    """Graphs and names by digest."""
    infos = store.named_models(wanted) if wanted else store.models()
    if not infos:
        raise InputError(
            "the planner has no models to learn from", remedy="add some with `stageloom model add`"
        )
    return {one.digest: store.graph(one.digest) for one in infos}, {one.digest: one.model for one in infos}


def _costs(store: "ReadStore", device: str, artifacts: "list[Digest]") -> "tuple[CostsOf, str]":
    """The cost model, and the device class that it is of; no class for estimates."""
    from stageloom.planner.costs.measured import device_costs
    from stageloom.planner.learning.gpg.lessons import analytic_costs
    from stageloom.shared.ids import DeviceId
    from stageloom.shared.plan import ExecutorOptions

    if not device:
        return analytic_costs, ""
    device_class = store.device(DeviceId(device)).device_class
    models = [(one, 1) for one in artifacts]
    table = device_costs(store, device_class, ExecutorOptions(), models, graph_of=store.graph)
    return lambda members, random: table.for_members(members), device_class


class _Bar:
    """A line that redraws itself on a terminal; elsewhere a line per validation."""

    def __init__(self) -> None:
        self._validated = 0

    def __call__(self, trainer: "Trainer") -> None:
        """After every step."""
        steps = trainer.settings.steps
        best = f"best {trainer.best_ratio:.3f} of sequential" if trainer.history else "not validated yet"
        if sys.stderr.isatty():
            done = _BAR * trainer.step // steps
            bar = "#" * done + "." * (_BAR - done)
            end = "\n" if trainer.done else ""
            sys.stderr.write(f"\r[{bar}] {trainer.step}/{steps} {trainer.phase}, {best} {end}")
            sys.stderr.flush()
        elif len(trainer.history) > self._validated:
            self._validated = len(trainer.history)
            progress(f"step {trainer.step} of {steps}, {trainer.phase}: {best}")
