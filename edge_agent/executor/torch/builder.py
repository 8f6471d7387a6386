"""Builds programs on a device, off the serving path: warm up, choose kernels and form, capture.

All of it happens on scratch memory, since the plan may be serving, and on one thread, since cudnn remembers
what it found per thread. Only the last capture is bound to the plan's own buffers.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from stageloom.edge_agent.executor.cuda.device import (
    CAPTURING,
    PREPARING,
    Event,
    Graph,
    GraphDevice,
    Pool,
    Stream,
    streams_from,
)
from stageloom.edge_agent.executor.cuda.layout import CallKind
from stageloom.edge_agent.executor.cuda.recipe import Marks, issue_program
from stageloom.edge_agent.executor.torch.kernels import (
    USUAL_FLOP_PER_BYTE,
    Instruments,
    KernelChoices,
    KernelSite,
)
from stageloom.edge_agent.executor.torch.memory import ScratchBuffers, TorchProgram, position_of
from stageloom.edge_agent.executor.torch.plans import LoadedPlan
from stageloom.edge_agent.executor.torch.recipe import TorchRecipe
from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.edge_agent.lowering.model import ModelLowering
from stageloom.edge_agent.lowering.out_of_memory import is_out_of_memory
from stageloom.shared.engine.steps import ProgramKey

log = logging.getLogger(__name__)

_FORM_GAIN = 0.98  # one stream must take less than this of what several take, or the schedule stays

_COPIES = 4  # how many times a product's matrix a measured copy is, so that no cache holds it


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much building may measure."""

    warm_runs: int = 2
    laps: int = 7  # per kernel
    launches_per_lap: int = 10
    form_rounds: int = 15  # several streams against one; 0: the schedule stays as it is
    product_side: int = 2048  # of the matrices whose product says what the device reaches; 0: not measured
    alone: bool = True  # capture what runs single members as soon as a plan is loaded


@dataclass(slots=True)
class BuiltProgram:
    """A program with its graph; without one its launches are issued one by one."""

    program: TorchProgram
    graph: Graph | None = None
    pool: Pool | None = None  # that the graph is in
    nbytes: int = 0  # by which the pool grew when it was captured
    in_turn: bool = False  # on one stream, as that was measured to be faster
    traced: tuple[Graph, Marks] | None = None
    trace_wanted: bool = False
    tracing: bool = False  # a replay of `traced` is in flight
    last: Event | None = None  # the end of its latest run

    @property
    def given_up(self) -> bool:
        """Whether it could have a graph, and has none any more."""
        return self.graph is None and self.program.recipe.capturable

    def end_trace(self) -> None:
        """The replay of `traced` has ended."""
        self.tracing = False


class ProgramBuilder:
    """Runs on the building thread only."""

    def __init__(self, device: GraphDevice, choices: KernelChoices, effort: Effort) -> None:
        self._device = device
        self._choices = choices
        self._effort = effort
        self._balance: dict[Precision, float] = {}
        self._spare: tuple[Pool, Graph] | None = None

    def build(self, plan: LoadedPlan, key: ProgramKey, pool: Pool) -> BuiltProgram:
        """The program for a key, warmed up and captured.

        Raises:
            ExecutorError: it does not fit into the plan's memory.
            RuntimeError: torch cannot run or capture it.
        """
        with torch.inference_mode(), self._device.searching():
            recipe = plan.recipe_for(key)
            if not recipe.capturable:
                return BuiltProgram(self._bound(plan, recipe))
            self._choose_kernels(plan, recipe)
            recipe = plan.recipe_for(key)
            in_turn = self._faster_in_turn(plan, key, recipe)
            if in_turn:
                recipe = plan.recipe_for(key, in_turn=True)
            self._warm(self._scratch(plan, recipe))
            program = self._bound(plan, recipe)
            before = self._device.reserved_bytes()
            graph = self._capture(program, pool)
            taken = max(0, self._device.reserved_bytes() - before)
        return BuiltProgram(program, graph, pool, taken, in_turn)

    def trace(self, built: BuiltProgram, pool: Pool) -> None:
        """A second graph of the program that also records when its groups begin and end."""
        marks: Marks = {}
        with torch.inference_mode(), self._device.searching():
            built.traced = (self._capture(built.program, pool, marks), marks)

    def rehearse(self, built: BuiltProgram) -> None:
        """Replay once: the first time is slow. Only while nothing uses the plan's buffers (P11)."""
        if built.graph is None:
            return
        stream = self._device.stream(PREPARING)
        self._device.replay(stream, built.graph)
        self._device.synchronize(self._device.record(stream))

    def lap(self, launch: Callable[[], object], capturable: bool) -> float:
        """Seconds of one launch on the device, without what it costs to issue it."""
        with torch.inference_mode(), self._device.searching():
            return median(self._laps(launch, capturable, 1))

    def _bound(self, plan: LoadedPlan, recipe: TorchRecipe) -> TorchProgram:
        program = plan.bind(recipe)
        self._device.settle()
        return program

    def _scratch(self, plan: LoadedPlan, recipe: TorchRecipe) -> TorchProgram:
        program = plan.bind(recipe, ScratchBuffers(self._device.torch_device))
        self._device.settle()
        return program

    def _streams(self, program: TorchProgram) -> Sequence[Stream]:
        return streams_from(self._device, PREPARING, program.recipe.streams)

    def _warm(self, program: TorchProgram) -> None:
        streams = self._streams(program)
        for _ in range(self._effort.warm_runs):
            issue_program(program, self._device, streams)
        self._device.synchronize(self._device.record(streams[0]))

    def _capture(self, program: TorchProgram, pool: Pool, marks: Marks | None = None) -> Graph:
        """For serving: a graph's kernels keep the priority of the streams that it was captured on (P8)."""
        streams = streams_from(self._device, CAPTURING, program.recipe.streams)
        return self._device.capture(pool, streams, partial(self._issue, program, streams, marks))

    def _issue(self, program: TorchProgram, streams: Sequence[Stream], marks: Marks | None = None) -> None:
        issue_program(program, self._device, streams, marks=marks, captured=True)

    def _captured_to_measure(self, streams: Sequence[Stream], body: Callable[[], None]) -> Graph:
        try:
            return self._device.capture(self._spare_pool(), streams, body)
        except RuntimeError:
            self._spare = None  # a pool that a capture failed in takes no other
            raise

    # Kernels

    def _choose_kernels(self, plan: LoadedPlan, recipe: TorchRecipe) -> None:
        """Measure every operator of the recipe that was not measured before with such tensors."""
        program = self._scratch(plan, recipe)
        todo = []
        for index, (call, unit) in enumerate(zip(recipe.calls, recipe.kernels, strict=True)):
            if unit is None or call.kind is not CallKind.KERNEL:
                continue
            site = KernelSite(*self._model(plan, recipe, index), unit, *program.arguments(index))
            if self._choices.choice(site) is None:
                todo.append(site)
        if not todo:
            return
        self._warm(program)
        instruments = Instruments(self._timer, self._demand, self._flop_per_byte(plan.precision), self._once)
        for site in todo:
            self._choices.measure(site, instruments)

    def _once(self, launch: Callable[[], object]) -> None:
        stream = self._device.stream(PREPARING)
        self._device.launch(stream, launch)
        self._device.synchronize(self._device.record(stream))

    def _spare_pool(self) -> Pool:
        """The pool of everything that is captured to be measured, one after the other.

        Each in a pool of its own would take 2 or 20 MiB, until all of that is given back, for which the
        device waits. A pool is known as long as one of its graphs lives, so the first one stays.
        """
        if self._spare is None:
            pool, stream = self._device.new_pool(), self._device.stream(PREPARING)
            pulse = torch.zeros(1, device=self._device.torch_device)
            self._device.settle()

            def body() -> None:
                self._device.launch(stream, pulse.zero_)

            body()  # loads the kernel, which a capture may not
            self._device.synchronize(self._device.record(stream))
            self._spare = pool, self._device.capture(pool, [stream], body)
        return self._spare[0]

    def _demand(self, launch: Callable[[], object]) -> float:
        """The largest share of a multiprocessor that a block of any of its kernels takes (Opara)."""
        try:
            needs = self._device.block_needs(self._spare_pool(), self._device.stream(PREPARING), launch)
        except RuntimeError as error:  # the driver's: the order is no reason to go without the program
            self._spare = None
            log.warning("a kernel's demand stays unknown: %s", error)
            return 0.0
        of = self._device.multiprocessor()
        return max((need.shares(of).demand for need in needs), default=0.0)

    def _flop_per_byte(self, precision: Precision) -> float:
        """What the device computes in a large product for every byte that a large copy moves; once each."""
        if not self._effort.product_side:
            return USUAL_FLOP_PER_BYTE
        if precision not in self._balance:
            try:
                balance = self._measured_balance(precision)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                balance = USUAL_FLOP_PER_BYTE
            log.info("balance precision=%s flop_per_byte=%.1f", precision.value, balance)
            self._balance[precision] = balance
        return self._balance[precision]

    def _measured_balance(self, precision: Precision) -> float:
        side, device = self._effort.product_side, self._device.torch_device
        dtype = torch.float16 if precision is Precision.FP16 else torch.float32
        left, right, product = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(3))
        source, target = (torch.ones(_COPIES * side * side, device=device) for _ in range(2))
        self._device.settle()
        product_s = median(self._timer(partial(torch.mm, left, right, out=product)))
        copy_s = median(self._timer(partial(target.copy_, source)))
        return (2 * side**3 / product_s) / (2 * source.nbytes / copy_s)

    def _model(self, plan: LoadedPlan, recipe: TorchRecipe, call: int) -> tuple[ModelLowering, int]:
        part = recipe.parts[position_of(recipe.calls[call])]
        return plan.lowering(part.member.model), part.batch

    def _timer(self, launch: Callable[[], object]) -> Sequence[float]:
        return self._laps(launch, True, self._effort.laps)

    def _laps(self, launch: Callable[[], object], capturable: bool, laps: int) -> list[float]:
        device = self._device
        stream = device.stream(PREPARING)
        count = self._effort.launches_per_lap if capturable else 1

        def several() -> None:
            for _ in range(count):
                device.launch(stream, launch)

        several()
        device.synchronize(device.record(stream))
        graph = self._captured_to_measure([stream], several) if capturable else None
        taken = []
        for lap in range(laps + 1):
            began = device.record(stream, timed=True)
            if graph is None:
                several()
            else:
                device.replay(stream, graph)
            ended = device.record(stream, timed=True)
            device.synchronize(ended)
            if lap:  # the first replay is slow
                taken.append(device.elapsed_s(began, ended) / count)
        return taken

    # Form

    def _faster_in_turn(self, plan: LoadedPlan, key: ProgramKey, recipe: TorchRecipe) -> bool:
        """Whether the same operators on one stream take less time (P12)."""
        if recipe.streams == 1 or not self._effort.form_rounds:
            return False
        in_turn = plan.recipe_for(key, in_turn=True)
        if in_turn.arena_bytes > plan.buffers.arena_room(in_turn):
            return False
        self._choose_kernels(plan, in_turn)  # its buffers may have another layout
        programs = [self._scratch(plan, form) for form in (recipe, in_turn)]
        graphs = []
        for program in programs:
            self._warm(program)
            streams = self._streams(program)
            graphs.append(self._captured_to_measure(streams, partial(self._issue, program, streams)))
        several_s, one_s = self._compare(graphs)
        log.info(
            "form combined=%d mask=%d streams=%d us=%.1f in_turn_us=%.1f",
            key.combined,
            key.mask,
            recipe.streams,
            several_s * 1e6,
            one_s * 1e6,
        )
        return one_s < _FORM_GAIN * several_s

    def _compare(self, graphs: Sequence[Graph]) -> list[float]:
        """Median seconds of each, by turns so that a change of clocks meets both."""
        device = self._device
        stream = device.stream(PREPARING)
        taken: list[list[float]] = [[] for _ in graphs]
        for round_ in range(self._effort.form_rounds + 1):
            for index, graph in enumerate(graphs):
                began = device.record(stream, timed=True)
                device.replay(stream, graph)
                ended = device.record(stream, timed=True)
                device.synchronize(ended)
                if round_:
                    taken[index].append(device.elapsed_s(began, ended))
        return [median(seconds) for seconds in taken]
