"""`stageloom train ...`: learn to schedule models (gpg), and to combine blocks and launch (maddpg)."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stageloom.planner.cli.options import (
    LAST_S,
    DatabaseUrl,
    DataDir,
    Json,
    Last,
    Rates,
    TwinFile,
    model_options,
    parse_duration,
    parse_rates,
    reading,
)
from stageloom.planner.cli.output import emit, emit_json, progress
from stageloom.planner.cli.training_view import TrainingView, figures, rivals_worth
from stageloom.shared.errors import InputError

if TYPE_CHECKING:
    from stageloom.planner.learning.gpg.lessons import CostsOf
    from stageloom.planner.learning.gpg.trainer import Trainer
    from stageloom.planner.learning.maddpg.settings import MaddpgSettings
    from stageloom.planner.learning.maddpg.stored import StoredProblem, Wanted
    from stageloom.planner.learning.maddpg.train import MaddpgResult
    from stageloom.planner.store.database import Database
    from stageloom.planner.store.store import ReadStore
    from stageloom.shared.graph import Graph
    from stageloom.shared.ids import Digest
Device = Annotated[
    str, typer.Option("--device", metavar="NAME", help="Learn for it, from what was measured there.")
]
Budget = Annotated[
    str, typer.Option(metavar="TIME", help="Such as 90s, 10m or 1h, in all; the best so far is kept.")
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME[:KEY=VALUE,...]",
        help="A model to serve there, as for `plan create`. Repeatable. Default: those of the plan it runs.",
    ),
]
Partition = Annotated[str, typer.Option(metavar="NAME", help="How --model is cut: whole, base, or paper.")]
MembersMax = Annotated[
    int | None,
    typer.Option(min=1, max=8, metavar="H", help="Blocks in a combined one. Default: TOP's for the twin."),
]
Transitions = Annotated[int, typer.Option(min=20, metavar="N", help="Steps of experience; fewer end sooner.")]
Seed = Annotated[
    int,
    typer.Option(min=0, max=10_000, metavar="N", help="With one worker, equal seeds give equal policies."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, metavar="N", help="Rollout actors. Default: one less than there are cores."
    ),
]
RayAddress = Annotated[
    str,
    typer.Option(
        "--ray-address",
        metavar="HOST:PORT|local",
        help="Have the actors on this Ray cluster, or a Ray of this machine. Default: plain processes.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where the run, its curves and the policy go. Default: not kept."),
]

GpgModels = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="NAME", help="Learn from this one. Repeatable. Default: all."),
]
GpgDevice = Annotated[
    str,
    typer.Option("--device", metavar="NAME", help="Learn its class's measured costs. Default: estimates."),
]
GpgSeed = Annotated[int, typer.Option(min=0, metavar="N", help="Equal seeds give equal policies.")]
ImitationSteps = Annotated[int, typer.Option(min=0, metavar="N", help="Blocks to imitate exact search on.")]
Episodes = Annotated[int, typer.Option(min=0, metavar="N", help="Blocks to try and learn from.")]
GpgMembersMax = Annotated[
    int, typer.Option(min=1, max=8, metavar="H", help="Blocks in a combined one, at most.")
]
GpgBudget = Annotated[
    str,
    typer.Option(
        "--budget",
        "--time-limit",
        metavar="TIME",
        help="Such as 90s, 10m or 1h, in all; the best so far is kept.",
    ),
]


app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Train the learned policies.")

_BAR = 30


@app.callback()
def train() -> None:
    """Train the learned policies."""


@app.command()
def gpg(
    model: GpgModels = None,
    device: GpgDevice = "",
    imitation_steps: ImitationSteps = 400,
    episodes: Episodes = 300,
    members_max: GpgMembersMax = 3,
    seed: GpgSeed = 0,
    budget: GpgBudget = "15m",
    output: Output = None,
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
    from stageloom.planner.store.policies import store_policy
    from stageloom.shared.policy.gpg.checkpoint import decode

    if not imitation_steps + episodes:
        raise InputError("nothing to train", remedy="give --imitation-steps or --episodes")
    budget_s = parse_duration(budget, "--budget")
    with reading(data_dir, database_url) as store:
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
        digest = store.database.change(
            store_policy,
            found.checkpoint,
            policy="gpg",
            device_class=device_class,
            provenance=provenance,
            curves=rows(found.history),
            trained_at_us=time.time_ns() // 1000,
        )
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
    from stageloom.planner.store.models import model_infos, named_models

    infos = store.read(named_models, wanted) if wanted else store.read(model_infos)
    if not infos:
        raise InputError(
            "the planner has no models to learn from", remedy="add some with `stageloom model add`"
        )
    return {one.digest: store.graph(one.digest) for one in infos}, {one.digest: one.model for one in infos}


def _costs(store: "ReadStore", device: str, artifacts: "list[Digest]") -> "tuple[CostsOf, str]":
    """The cost model, and the device class that it is of; no class for estimates."""
    from stageloom.planner.costs.measured import device_costs
    from stageloom.planner.learning.gpg.lessons import analytic_costs
    from stageloom.planner.store.devices import device_info
    from stageloom.shared.ids import DeviceId
    from stageloom.shared.plan import ExecutorOptions

    if not device:
        return analytic_costs, ""
    device_class = store.read(device_info, DeviceId(device)).device_class
    models = [(one, 1) for one in artifacts]
    table = device_costs(store, device_class, ExecutorOptions(), models, graph_of=store.graph)
    return lambda members, random: table.for_members(members), device_class


class _Bar:
    """A line that redraws itself on a terminal; elsewhere a line per validation."""

    def __init__(self) -> None:
        self._validated = 0

    def __call__(self, trainer: "Trainer") -> None:
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


LOCAL = "local"


@app.command()
def maddpg(
    device: Device,
    budget: Budget = "10m",
    model: Models = None,
    partition: Partition = "base",
    twin: TwinFile = "",
    rate: Rates = None,
    last: Last = LAST_S,
    members_max: MembersMax = None,
    transitions: Transitions = 2000,
    seed: Seed = 0,
    workers: Workers = None,
    ray_address: RayAddress = "",
    output: Output = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Train maddpg on the device's twin. Keeps the policy and the best plan found on the way.

    The planner may run; the next re-plan of a device of this class takes the policy into account. Nothing is
    pushed: a plan must win its trial on the device. Ctrl-C keeps the best so far. With --output a run that
    was interrupted or killed goes on when the same command is given again, at most one validation earlier.

    \b
    stageloom train maddpg --device shop-7 --budget 10m --output training
    stageloom train maddpg --device shop-7 --model resnet50 --model squeezenet:replicas=2 \\
        --rate resnet50=30 --rate squeezenet=60 --twin nano --workers 4
    """
    from stageloom.planner.learning.maddpg.settings import MaddpgSettings
    from stageloom.planner.learning.maddpg.stored import Wanted, stored_problem
    from stageloom.shared.ids import DeviceId

    budget_s = parse_duration(budget, "--budget")
    wanted = Wanted(
        device=DeviceId(device),
        models=tuple(model_options(text, partition=partition) for text in model or ()),
        twin=twin,
        rates_per_s=parse_rates(rate) or None,
        last_s=last,
        members_max=members_max,
    )
    settings = MaddpgSettings.of_length(transitions)
    with reading(data_dir, database_url) as store:
        found = stored_problem(store, wanted)
        run = _Run(wanted, found, settings, seed, budget_s, workers or default_workers(), ray_address, output)
        progress(f"twin: {found.times}; arrivals: {found.arrivals}; {run.about['blocks']} blocks")
        trained = run.train()
        digest, plan = _keep(store.database, trained)
    if output is not None:
        _write(output, trained, found)
    _tell(device, digest, plan, trained, found, json=json)


def default_workers() -> int:
    """All cores but one, which the learner needs."""
    return max((os.cpu_count() or 1) - 1, 1)


class _Run:
    """One training, that may have begun earlier."""

    def __init__(
        self,
        wanted: "Wanted",
        found: "StoredProblem",
        settings: "MaddpgSettings",
        seed: int,
        budget_s: float,
        workers: int,
        ray_address: str,
        output: Path | None,
    ) -> None:
        self._problem, self._settings, self._seed = found.problem, settings, seed
        self._budget_s, self._workers, self._ray_address = budget_s, workers, ray_address
        self._output = output
        space = found.problem.space
        self.about: dict[str, Any] = {
            "device_class": space.device_class,
            "models": [[one.artifact, *one.cuts, one.replicas, one.batch] for one in space.models],
            "blocks": space.bins,
            "members_max": space.members_max,
            "twin": wanted.twin,
            "rate": wanted.rates_per_s,
            "settings": settings.plain(),
            "seed": seed,
        }

    def train(self) -> "MaddpgResult":
        """Begin, or go on; to the end, the budget's or Ctrl-C's."""
        from stageloom.planner.cluster.search_pool import AnytimePool
        from stageloom.planner.learning.maddpg.train import load_run, save_run, train

        kept = None
        if self._output is not None:
            self._output.mkdir(parents=True, exist_ok=True)
            kept = load_run(self._output, self.about)
        spent_s = kept[0] if kept else 0.0
        if kept:
            progress(f"going on after {spent_s:.0f} s of training")
        began_s = time.monotonic()

        def save(state: bytes) -> None:
            if self._output is not None:
                save_run(self._output, self.about, spent_s + time.monotonic() - began_s, state)

        address = "" if self._ray_address == LOCAL else self._ray_address
        pool = AnytimePool(self._workers, use_ray=bool(self._ray_address), ray_address=address, idle_s=None)
        where = f"{self._workers} worker{'s' if self._workers > 1 else ''}"
        view = TrainingView(self._budget_s, spent_s, where)
        try:
            return train(
                self._problem,
                self._settings,
                self._seed,
                clock=time.monotonic,
                budget_s=self._budget_s,
                state=kept[1] if kept else None,
                spent_s=spent_s,
                save=save,
                pool=pool,
                on_result=view,
            )
        finally:
            view.close()
            pool.close()


def _keep(database: "Database", trained: "MaddpgResult") -> tuple[str, str]:
    """The policy's digest and the best plan's name, both in the store."""
    from stageloom.planner.cli.policy import keep_policy
    from stageloom.planner.store.plans import keep_plan

    digest = keep_policy(database, trained.checkpoint, [one.plain() for one in trained.history])
    return digest, database.change(keep_plan, trained.plan, "maddpg")


def _write(output: Path, trained: "MaddpgResult", found: "StoredProblem") -> None:
    import json as json_text

    from stageloom.planner.twin.device_file import device_toml

    curves = json_text.dumps([one.plain() for one in trained.history], indent=1)
    (output / "curves.json").write_text(curves + "\n", encoding="utf-8")
    (output / "maddpg.checkpoint").write_bytes(trained.checkpoint)
    (output / "twin.toml").write_text(device_toml(found.device), encoding="utf-8")


def _tell(
    device: str, digest: str, plan: str, trained: "MaddpgResult", found: "StoredProblem", *, json: bool
) -> None:
    rows = {
        **rivals_worth(trained.seeds_worth),
        "policy": trained.policy_worth,
        "best plan": trained.plan_worth,
    }
    if json:
        emit_json(
            {
                "checkpoint": digest,
                "plan": plan,
                "ended": trained.ended,
                "train_s": trained.train_s,
                "transitions": trained.transitions,
                "updates": trained.updates,
                "twin": found.times,
                "arrivals_per_s": list(found.problem.arrivals_per_s),
                "rows": {name: worth.plain() for name, worth in rows.items()},
            }
        )
        return
    for name, worth in rows.items():
        emit(f"{name:<12} {figures(worth)}")
    emit(
        f"{digest[:12]}: {trained.transitions} transitions in {trained.train_s:.0f} s, "
        f"ended: {trained.ended}; plan {plan}"
    )
    progress(f"try the plan on the device: stageloom plan push {device} {plan}")
