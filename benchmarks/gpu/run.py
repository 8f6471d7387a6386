"""One run: the parts in order, each with its share of the time."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.gpu import judging
from benchmarks.gpu.device import Device, make_device
from benchmarks.gpu.networks import Subject, make_subject, onnxruntime_error
from benchmarks.gpu.plans import Knowledge
from benchmarks.gpu.probes import Ceilings, measure_ceilings, multiprocessor, operators_of, run_probes
from benchmarks.gpu.profiled_kernels import OperatorResources, Rates
from benchmarks.gpu.results import Deadline, Results, Settings, why
from benchmarks.gpu.rivals import MIX, SLICING, Compiling, Slices, use_precision
from benchmarks.gpu.serving import Service, ServingRows
from benchmarks.gpu.table import Table
from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.machine.utilisation import this_machine
from stageloom.shared.plan import Plan

_SEED = 20261121
_AFTER_TABLE_S = 75.0  # serving, switching, concurrency
_TF32_S = 45.0  # three fifths for building
_AFTER_COMPILED_S = 190.0  # the rounds as well
_OPERATORS_S = 60.0  # of one model, in a child
_CONCURRENCY_S = 10.0
_SWITCHING_S = 35.0  # with concurrency
_DELAY_S = 2e-4
_OF_THE_TABLE = ("correctness", "table", "tf32", "serving", "switching", "concurrency")


class Run:
    def __init__(self, settings: Settings, results: Results, deadline: Deadline, folder: Path) -> None:
        self._settings = settings
        self._results = results
        self._deadline = deadline
        self._folder = folder
        self._rng = Random(_SEED)
        self._device: Device = make_device(settings.device)
        self._compiling: Compiling | None = None
        self._slices: Slices | None = None
        self._subjects: list[Subject] = []
        self._table: Table | None = None
        self._ceilings: Ceilings | None = None
        self._resources: dict[str, list[OperatorResources]] = {}
        self._clocks: dict[str, Any] = {}
        self._judged = False

    def about(self) -> dict[str, Any]:
        """The device and how it was run."""
        return {
            **self._described(),
            "power_mode": this_machine().power_mode(),
            "precision": self._settings.precision,
            "executor": self._settings.executor,
            **self._clocks,
        }

    def _described(self) -> dict[str, Any]:
        try:
            return self._device.describe()
        except RuntimeError as error:  # what was measured before the device was lost is told all the same
            return {"gpu": f"lost: {why(error)}"}

    def all_parts(self) -> None:
        """Everything that the settings want."""
        settings, results = self._settings, self._results
        use_precision(settings.precision)
        self._note_clocks("before")
        if settings.device == "cuda" and (settings.wants("table") or settings.wants("compile")):
            with results.attempt("table", "torch.compile in child processes"):
                self._compiling = Compiling(settings.models, settings.zoo, settings.precision, self._folder)
        if settings.children and settings.wants("table"):
            with results.attempt("table", SLICING):
                self._slices = Slices(settings.device, settings.models, settings.zoo, settings.precision)
        self._make_subjects()
        if not self._subjects:
            return
        if self._compiling is not None:  # nothing is timed while others use the device
            self._compiling.wait(settings.compile_s)
            self._report_compiling(self._compiling)
        if self._slices is not None:
            with results.attempt("table", SLICING):
                self._slices.wait_ready()
        if settings.parts == ("compile",):
            return
        with results.attempt("probe", "ceilings"):
            quick = settings.quick
            found = measure_ceilings(self._device, self._subjects, settings.precision, quick=quick)
            self._ceilings = found
            judging.add_ceilings(results, found)
        if settings.wants("probes"):
            run_probes(self._device, self._subjects, settings, results, self._deadline)
        if not any(settings.wants(part) for part in _OF_THE_TABLE):
            return
        self._measure_operators()
        try:
            self._build_and_measure()
            if self._wants_tf32:  # before the open loads, which take all the time that is left
                with results.attempt("tf32", "all rows"):
                    self._tf32()
            self._serve()
        finally:
            self._judge(None)
        self._note_clocks("after")

    def _judge(self, switch: Mapping[str, Any] | None) -> None:
        """The goals, once; `switch` are the figures of the plan switches."""
        if self._table is not None and not self._judged:
            judging.add_goals(self._results, self._table, switch)
            self._judged = True

    @property
    def _wants_tf32(self) -> bool:
        return self._settings.wants("tf32") and self._settings.precision == "fp16"

    def _make_subjects(self) -> None:
        settings = self._settings
        for name in settings.models:
            with self._results.attempt("correctness", f"{name}: import and reference"):
                zoo = settings.zoo
                subject = make_subject(name, self._folder, width=zoo.width, size=zoo.size)
                self._subjects.append(subject)
                error, reason = onnxruntime_error(subject)
                if reason:
                    self._results.skip("correctness", f"{name}, onnxruntime on the CPU", reason)
                else:
                    self._results.add(
                        {f"correctness.{name}.onnxruntime": error},
                        part="correctness",
                        name=f"{name}, onnxruntime on the CPU",
                        error=error,
                    )

    def _report_compiling(self, compiling: Compiling) -> None:
        for (model, mode), seconds in compiling.taken_s.items():
            name = f"compiling {model}, {mode}"
            self._results.add({}, part="table", name=name, seconds=seconds)
        if self._settings.parts == ("compile",):  # else each is told in its row of the table
            for (model, mode), reason in compiling.failed.items():
                self._results.skip("table", f"compiling {model}, {mode}", reason)

    def _measure_operators(self) -> None:
        """What every operator asks of a multiprocessor, and what bounds it: for costs and Opara's order."""
        settings = self._settings
        if self._ceilings is None or self._device.kind != "cuda" or not settings.children:
            self._results.skip("operators", "resources", "needs CUDA, the ceilings and child processes")
            return
        rates = Rates(flop_per_s=self._ceilings.flop_per_s, bytes_per_s=self._ceilings.bytes_per_s)
        for subject in self._subjects:
            with self._results.attempt("operators", subject.name):
                found = operators_of(
                    subject.name,
                    settings.zoo,
                    self._device.kind,
                    settings.precision,
                    rates,
                    limit_s=self._deadline.share_s(0.2, most=_OPERATORS_S),
                )
                self._resources[subject.name] = found
                known = [one for one in found if one.device_us]
                self._results.add(
                    {f"operators.{subject.name}.device_us": sum(one.device_us for one in known)},
                    part="operators",
                    name=subject.name,
                    operators=len(found),
                    seen=len(known),
                    kernels=sum(one.kernels for one in known),
                    device_us=sum(one.device_us for one in known),
                    memory_bound=sum(one.bound == "memory" for one in known),
                    compute_bound=sum(one.bound == "compute" for one in known),
                    most_registers=max((one.registers for one in known), default=0),
                    most_shared_bytes=max((one.shared_bytes for one in known), default=0),
                )

    def _knowledge(self, precision: str) -> Knowledge:
        return Knowledge(self._settings.executor, precision, self._resources, multiprocessor(self._device))

    def _build_and_measure(self) -> None:
        settings, deadline = self._settings, self._deadline
        table = Table(self._device, self._subjects, settings, self._results, rng=self._rng, building=deadline)
        self._table = table
        table.build_torch()
        table.build_ours(self._knowledge(settings.precision))
        if settings.wants("table"):
            table.build_compiled(self._compiling, deadline, _AFTER_COMPILED_S * (not settings.quick))
            table.build_slices(self._slices)
            table.build_providers(deadline, _AFTER_COMPILED_S * (not settings.quick))
        table.check()
        if settings.wants("correctness"):
            self._stability(table)
        if settings.wants("table"):
            reserve_s = 0.0 if settings.quick else _AFTER_TABLE_S + _TF32_S * self._wants_tf32
            seconds = max(deadline.left_s - reserve_s, deadline.left_s / 3)
            ends_s = time.monotonic() + seconds
            with self._results.attempt(table.part, "rounds"):
                table.measure(seconds, lambda: time.monotonic() >= ends_s)
            table.report()
            if self._ceilings is not None:
                judging.add_distances(
                    self._results, table, self._subjects, self._ceilings, settings.precision
                )

    def _stability(self, table: Table) -> None:
        """Ours, the chosen plan of every subject and of the mix: the same bits under random delays."""
        ours = table.ours
        if ours is None:
            return
        for subject in [*(one.name for one in self._subjects), MIX]:
            name = table.best.get(subject)
            if name is None:
                continue
            with self._results.attempt("correctness", f"{subject}, {name}: stable"):
                same = ours.stable((subject, name), self._settings.repeats, self._pause)
                self._results.add(
                    {f"correctness.stable.{subject}": float(same)},
                    part="correctness",
                    name=f"{subject}, {name}: {self._settings.repeats} repeats with random delays",
                    stable=same,
                )

    def _pause(self) -> None:
        time.sleep(self._rng.random() * _DELAY_S)

    def _best_mix(self) -> Plan | None:
        """The fastest joint plan of one replica each: 7 masks are soon captured, those of 12 members not."""
        table = self._table
        if table is None:
            return None
        times = table.quick_us.get(MIX, {})
        small = [name for name in times if table.candidates[MIX, name].units == 1]
        best = min(small, key=lambda name: times[name], default=None)
        return None if best is None else table.candidates[MIX, best].plan

    def _serve(self) -> None:
        """Engine rows, the goals, and concurrency."""
        settings, results, table = self._settings, self._results, self._table
        executor = None
        if settings.wants("serving") or settings.wants("switching"):
            with results.attempt("serving", "our executor, with nothing loaded"):
                executor = table.hand_over() if table is not None else None
        if executor is None:
            self._judge(None)
            self._add_concurrency()
            return
        switch = None
        service = Service(executor, self._subjects)
        try:
            rows = ServingRows(service, self._subjects, settings, results, self._best_mix())
            if settings.wants("serving"):
                with results.attempt("serving", "full queues"):
                    rows.full_queues(self._deadline.within(self._deadline.left_s - _SWITCHING_S))
            if settings.wants("switching"):
                with results.attempt("switching", "between sequential graphs and ours"):
                    switch = rows.switch(self._deadline.share_s(0.4, most=25.0))
            if settings.wants("serving"):
                with results.attempt("serving", "open loads"):
                    rows.open_loads(self._deadline.within(self._deadline.left_s - _CONCURRENCY_S), self._rng)
            self._judge(switch)  # before the profiler, which is the likeliest to end the process
            self._add_concurrency(executor)
        finally:
            with results.attempt("serving", "closing"):
                service.close()

    def _add_concurrency(self, lent: Executor | None = None) -> None:
        """Last: a process that was profiled once launches more slowly. `lent`: the service's executor."""
        table = self._table
        if table is None or not self._settings.wants("concurrency"):
            return
        with self._results.attempt("concurrency", "kernel intervals"):
            variants = table.variants if lent is None else table.take_back(lent)
            judging.add_concurrency(self._results, self._device, table, variants)
        if lent is not None:
            table.hand_over()

    def _tf32(self) -> None:
        """The shortest table in TF32: sequential graphs beside ours."""
        settings = self._settings
        deadline = self._deadline.within(self._deadline.left_s if settings.quick else _TF32_S)
        least_s = 1.0 if settings.quick else 20.0
        if deadline.left_s < least_s:
            self._results.skip("tf32", "all rows", "the time was up")
            return
        use_precision("tf32")
        few = replace(
            settings, precision="tf32", batches=(), instances=(), mix_instances=(1,), modes=(), children=False
        )
        building = deadline.within(deadline.share_s(0.6))
        table = Table(self._device, self._subjects, few, self._results, rng=self._rng, building=building)
        try:
            table.build_torch()
            table.build_ours(self._knowledge("tf32"))
            table.check()
            ends_s = time.monotonic() + deadline.share_s(0.9)
            table.measure(deadline.share_s(0.8), lambda: time.monotonic() >= ends_s)
            table.report()
        finally:
            table.close()
            use_precision(settings.precision)

    def _note_clocks(self, when: str) -> None:
        for metric in this_machine().clocks():
            if metric.value is not None:
                self._clocks[f"{metric.name}_{when}"] = metric.text

    def close(self) -> None:
        """Free everything; end every child."""
        if self._compiling is not None:
            self._compiling.close()
        if self._slices is not None:
            self._slices.close()
        if self._table is not None:
            self._table.close()
