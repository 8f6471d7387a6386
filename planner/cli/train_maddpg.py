"""`stageloom train maddpg`: learn launch intervals and block combination for a device, on its twin."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageloom.planner.cli import train_options as opt
from stageloom.planner.cli.choices import model_choice
from stageloom.planner.cli.options import (
    LAST_S,
    DatabaseUrl,
    DataDir,
    Json,
    Last,
    Rates,
    TwinFile,
    data_dir_of,
    parse_duration,
    parse_rates,
)
from stageloom.planner.cli.output import emit, emit_json, progress
from stageloom.planner.cli.training_view import TrainingView, figures, rivals_worth

if TYPE_CHECKING:
    from stageloom.planner.learning.maddpg.settings import MaddpgSettings
    from stageloom.planner.learning.maddpg.stored import StoredProblem, Wanted
    from stageloom.planner.learning.maddpg.train import MaddpgResult
    from stageloom.planner.store.database import Database

LOCAL = "local"


def maddpg(
    device: opt.Device,
    budget: opt.Budget = "10m",
    model: opt.Models = None,
    partition: opt.Partition = "base",
    twin: TwinFile = "",
    rate: Rates = None,
    last: Last = LAST_S,
    members_max: opt.MembersMax = None,
    transitions: opt.Transitions = 2000,
    seed: opt.Seed = 0,
    workers: opt.Workers = None,
    ray_address: opt.RayAddress = "",
    output: opt.Output = None,
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
    from stageloom.planner.store.reading import ReadStore
    from stageloom.shared.ids import DeviceId

    budget_s = parse_duration(budget, "--budget")
    wanted = Wanted(
        device=DeviceId(device),
        models=tuple(model_choice(text, partition=partition) for text in model or ()),
        twin=twin,
        rates_per_s=parse_rates(rate) or None,
        last_s=last,
        members_max=members_max,
    )
    settings = MaddpgSettings.of_length(transitions)
    store = ReadStore.open(data_dir_of(data_dir), database_url)
    try:
        found = stored_problem(store, wanted)
        run = _Run(wanted, found, settings, seed, budget_s, workers or default_workers(), ray_address, output)
        progress(f"twin: {found.times}; arrivals: {found.arrivals}; {run.about['blocks']} blocks")
        trained = run.train()
        digest, plan = _keep(store.database, trained)
    finally:
        store.close()
    if output is not None:
        _write(output, trained, found)
    _tell(device, digest, plan, trained, found, json=json)


def default_workers() -> int:
    """One core is the learner's."""
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
    from stageloom.planner.cli.kept_policy import keep_policy
    from stageloom.planner.store import plans

    digest = keep_policy(database, trained.checkpoint, [one.plain() for one in trained.history])
    return digest, plans.keep(database, trained.plan, scheduler="maddpg", now_us=time.time_ns() // 1000)


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
