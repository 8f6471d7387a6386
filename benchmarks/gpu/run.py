"""One run: the parts in order, each with its share of the time."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.gpu.bench import Bench, Ceilings, measure_ceilings
from benchmarks.gpu.child import in_child
from benchmarks.gpu.device import Device, make_device
from benchmarks.gpu.judging import add_concurrency, add_distances, add_goals
from benchmarks.gpu.networks import Subject, make_subject
from benchmarks.gpu.ours import ResidentExecutor
from benchmarks.gpu.probes import run_probes
from benchmarks.gpu.process_rows import PART, add_process_rows
from benchmarks.gpu.results import Deadline, Results, Settings, why
from benchmarks.gpu.rivals import MIX, compile_child, row_name, use_precision
from benchmarks.gpu.serving import Service, ServingRows
from benchmarks.gpu.table import Table
from stageloom.edge_agent.executor.executors import make_executor
from stageloom.edge_agent.machine.utilisation import this_machine
from stageloom.shared.plan import Plan

_SEED = 20261121
_AFTER_TABLE_S = 75.0  # serving, switching, concurrency
_ROUNDS_S = 115.0  # of the table
_LEAST_SHARE = 1 / 3  # of what is left, for the rounds
_AFTER_FULL_QUEUES_S = 35.0
_CONCURRENCY_S = 10.0


@dataclass
class Run:
    settings: Settings
    results: Results
    deadline: Deadline
    folder: Path
    _rng: Random = field(default_factory=lambda: Random(_SEED))
    _subjects: list[Subject] = field(default_factory=list)
    _table: Table | None = None
    _service: Service | None = None
    _clocks: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device: Device = make_device(self.settings.device)

    def about(self) -> dict[str, Any]:
        """The device and how it was run."""
        try:
            device = self.device.describe()
        except RuntimeError as error:  # what was measured before the device was lost is told all the same
            device = {"gpu": f"lost: {why(error)}"}
        return {
            **device,
            "power_mode": this_machine().power_mode(),
            "precision": self.settings.precision,
            "executor": self.settings.executor,
            **self._clocks,
        }

    def all_parts(self) -> None:
        """Everything that the settings want."""
        settings, results = self.settings, self.results
        use_precision(settings.precision)
        self._note_clocks("before")
        for name in settings.models:
            with results.attempt("correctness", f"{name}: import and reference"):
                self._subjects.append(
                    make_subject(name, self.folder, width=settings.width, size=settings.size)
                )
        if not self._subjects:
            return
        compiled = self._compile()  # nothing is timed meanwhile
        if settings.parts == ("compile",):
            return
        bench = Bench(self.device, self._subjects, settings)
        ceilings: Ceilings | None = None
        with results.attempt("probe", "ceilings"):
            ceilings = measure_ceilings(bench)
            ceilings.add_to(results)
        if settings.wants("probes"):
            run_probes(bench, results)
        if settings.wants("correctness", "table", "switching", "concurrency"):
            self._measure(compiled, ceilings)
        elif settings.wants("serving"):
            with results.attempt("serving", f"executor {settings.executor}"):
                self._service = Service(make_executor(settings.executor), self._subjects)
                self._serve_rows(ServingRows(self._service, self._subjects, settings, results, None))
        if settings.wants(PART):
            add_process_rows(results, self.device, self._subjects, settings, self.deadline, self.folder)
        self._note_clocks("after")

    def _compile(self) -> set[tuple[str, str]]:
        """What torch.compile has ready by model and mode, in child processes, as time allows.

        Those that autotune take turns, since each would disturb the other's timings; the others do not.
        """
        settings = self.settings
        ready: set[tuple[str, str]] = set()
        if settings.device != "cuda" or not settings.wants("table", "compile"):
            return ready
        until = self.deadline.within(settings.compile_s)
        for mode in settings.modes:
            beside = 1 if "autotune" in mode else len(self._subjects)
            with ThreadPoolExecutor(beside) as pool:
                compiled = pool.map(partial(self._compile_one, mode, until), self._subjects)
                ready |= {
                    (subject.name, mode)
                    for subject, done in zip(self._subjects, compiled, strict=True)
                    if done
                }
        return ready

    def _compile_one(self, mode: str, until: Deadline, subject: Subject) -> bool:
        settings, results = self.settings, self.results
        name = f"compiling {subject.name}, {row_name(mode)}"
        if until.over:
            results.skip("table", name, "the time was up")
            return False
        began_s = time.monotonic()
        arguments = (settings.device, subject, mode, settings.precision)
        with results.attempt("table", name):
            in_child(compile_child, *arguments, limit_s=until.left_s)
            results.add({}, part="table", name=name, seconds=time.monotonic() - began_s)
            return True
        return False

    def _measure(self, compiled: set[tuple[str, str]], ceilings: Ceilings | None) -> None:
        """The table, plans in the engine, concurrency: last, as a profiled process launches slowly."""
        settings, results = self.settings, self.results
        table = Table(self.device, self._subjects, settings, results, rng=self._rng, building=self.deadline)
        self._table, switch = table, {}
        try:
            self._build(table, compiled)
            if settings.wants("table"):
                reserve_s = 0.0 if settings.quick else _AFTER_TABLE_S
                left_s = self.deadline.left_s
                table.measure(self.deadline.within(max(left_s - reserve_s, left_s * _LEAST_SHARE)))
                if ceilings is not None:
                    add_distances(results, table, ceilings)
            if table.ours is not None and settings.wants("serving", "switching"):
                switch = self._serve(table)
        finally:
            add_goals(results, table, switch)
        if settings.wants("concurrency"):
            # A capture in another thread makes waiting for the whole device fail.
            with results.attempt("concurrency", "kernel intervals"), self.device.nothing_captured():
                add_concurrency(results, table)

    def _build(self, table: Table, compiled: set[tuple[str, str]]) -> None:
        table.build_torch()
        table.build_ours()
        if self.settings.wants("table"):
            table.build_compiled(compiled)
            reserve_s = 0.0 if self.settings.quick else _AFTER_TABLE_S + _ROUNDS_S
            table.build_providers(self.deadline.within(self.deadline.left_s - reserve_s))
        table.check()

    def _serve(self, table: Table) -> dict[str, Any]:
        """Plans in the engine; the figures of the switches."""
        settings, results = self.settings, self.results
        assert table.ours is not None
        if isinstance(table.ours.executor, ResidentExecutor):
            table.ours.executor.builds_ahead = True  # as on a device that serves
        self._service = service = Service(table.ours.executor, self._subjects)
        switch: dict[str, Any] = {}
        rows = ServingRows(service, self._subjects, settings, results, self._best_mix(table))
        if settings.wants("switching"):
            with results.attempt("switching", "between sequential graphs and ours"):
                switch = rows.switches(self.deadline)
        if settings.wants("serving"):
            self._serve_rows(rows)
        return switch

    def _serve_rows(self, rows: ServingRows) -> None:
        results, deadline = self.results, self.deadline
        with results.attempt("serving", "full queues"):
            rows.full_queues(deadline.within((deadline.left_s - _AFTER_FULL_QUEUES_S) / 2))
        with results.attempt("serving", "open loads"):
            rows.open_loads(deadline.within(deadline.left_s - _CONCURRENCY_S), self._rng)

    def _best_mix(self, table: Table) -> Plan | None:
        """The fastest joint plan of one replica each: 7 masks are soon captured, those of 12 members not."""
        times = table.chosen_us.get(MIX, {})
        small = [name for name in times if table.candidates[MIX, name].units == 1]
        best = min(small, key=lambda name: times[name], default=None)
        return None if best is None else table.candidates[MIX, best].plan

    def _note_clocks(self, when: str) -> None:
        for metric in this_machine().clocks():
            if metric.value is not None:
                self._clocks[f"{metric.name}_{when}"] = metric.text

    def close(self) -> None:
        """Free everything."""
        if self._service is not None:
            self._service.engine.close()
        elif self._table is not None:
            self._table.close()
