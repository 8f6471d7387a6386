"""Carries requests out: finds the model, splits a batch into tasks, joins their outputs.

It is the agent's application: everything goes through one `Client`.
"""

import copy
import math
import time
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from stageloom.edge_agent.ingest.client import Client, TaskFuture
from stageloom.edge_agent.ingest.client_memory import Outputs, TaskInput
from stageloom.edge_agent.ingest.messages import ModelSignature, TensorInfo
from stageloom.edge_agent.ingest.signature import LAYOUT_CODES, by_any_name, tensor_bytes
from stageloom.edge_agent.reporting.status import ask_status
from stageloom.edge_agent.serving.datatypes import PROTOCOL_NAMES
from stageloom.edge_agent.serving.models import as_one, versions_of
from stageloom.edge_agent.serving.regions import RegionInput
from stageloom.edge_agent.serving.request import (
    InferenceAnswer,
    InferenceCall,
    MadeOutput,
    WantedOutput,
)
from stageloom.edge_agent.serving.statistics import Statistics
from stageloom.edge_agent.serving.waiting import InThread, OnLoop, ServiceWaiting
from stageloom.shared.errors import (
    InputError,
    NotFoundError,
    StageloomError,
    TaskRefused,
    UnavailableError,
)

_Submit: TypeAlias = Callable[[int], TaskFuture]
Submitted: TypeAlias = Callable[[Sequence[TaskFuture]], None]
"""Is told a request's tasks, at once or round by round."""

_KNOWN_S: Final = 1.0
"""For so long the models of the active plan are not asked for again."""

_NO_ROOM: Final = frozenset({"queue_full", "arena_full", "too_many_tasks"})
"""Codes of refusals that may not come again once tasks have ended."""

_TEXT_BYTES: Final = 32  # of a number in JSON, at most where nobody pads it
_HEADER_BYTES: Final = 64 << 10
_STANDS_FOR: Final = {"bfloat16": "uint16"}  # in views, where numpy has no such type when they are made


class InferenceService:
    """Every verb that needs the agent; on an event loop, unless it is one made by `in_threads`."""

    def __init__(self, path: Path, most_rows: int) -> None:
        """`path`: the agent's socket; `most_rows`: of one request.

        Raises:
            UnavailableError: no agent answers.
        """
        self._path = path
        self._client = Client(path)
        self._waiting: ServiceWaiting = OnLoop()
        self._models: dict[str, tuple[ModelSignature, ...]] = {}  # by what clients call them
        self._asked_s = -math.inf  # when the agent was asked for them
        self.most_rows = most_rows
        self.statistics = Statistics()

    def close(self) -> None:
        """Cancel what has not ended."""
        self._client.close()

    def in_threads(self) -> "InferenceService":
        """The same one for threads that may wait: its coroutines block, see `waiting.blocking`.

        It shares the client and the statistics, and asks for the models of the active plan itself.
        """
        other = copy.copy(self)
        other._waiting = InThread()
        return other

    # What is served

    async def refresh(self) -> dict[str, tuple[ModelSignature, ...]]:
        """The models of the active plan: several of a name where each is pinned to other shapes.

        Each is under its plan's name, too: a model's own name may look like that of one of several shapes.
        """
        self._asked_s = time.monotonic()
        found = await self._waiting.call(self._client.models)
        self._models = by_any_name(found.values())
        return self._models

    async def not_ready(self) -> str:
        """Why the agent would take no task; empty where it would."""
        try:
            return (await self._waiting.call(ask_status, self._path)).reason
        except StageloomError as error:
            return error.cause

    async def ready(self) -> bool:
        """Whether the agent would take a task."""
        return not await self.not_ready()

    async def model(self, name: str, version: str = "") -> ModelSignature:
        """A model of the active plan; of several shapes as one whose dimensions are open where they differ.

        Its version is that of its models, the newest of them where no version is named and they differ.

        Raises:
            NotFoundError: it has none of this name, or not this version.
            UnavailableError: the agent has no models yet.
        """
        return as_one(name, await self.models(name, version))

    async def models(self, name: str, version: str = "") -> tuple[ModelSignature, ...]:
        """The models of this name and, where one is named, of this version: one for each of their shapes.

        Raises:
            NotFoundError: it has none of this name, or not this version.
            UnavailableError: the agent has no models yet.
        """
        found = self._models.get(name)
        # Who names a version is told what runs now; the others may be told of the one before for a moment.
        if found is None or version or time.monotonic() > self._asked_s + _KNOWN_S:
            found = (await self.refresh()).get(name)
        if found is None:
            if not self._models:
                raise await self._no_models()
            have = ", ".join(sorted(self._models)[:8])
            raise NotFoundError(
                f"Request for unknown model: '{name[:64]}' is not found",
                remedy=f"models of the active plan: {have}",
            )
        wanted = tuple(one for one in found if version in ("", str(one.version)))
        if not wanted:
            have = " or ".join(map(str, versions_of(found)))
            raise NotFoundError(
                f"Request for unknown model: '{name}' version {version[:16]} is not at ready state",
                remedy=f"ask for version {have}, which the active plan has, or for none",
            )
        return wanted

    async def _no_models(self) -> UnavailableError:
        """Why there are none: a client is to ask again, and not to take its model for an unknown one."""
        reason = (await self._waiting.call(ask_status, self._path)).reason
        return UnavailableError(reason or "a plan has just become active", remedy="ask again in a moment")

    def body_limit(self, model: ModelSignature) -> int:
        """Bytes that a request for this model may have."""
        rows = self.most_rows if model.batchable else 1
        elements = sum(prod(info.shape) for info in model.inputs)
        nbytes = sum(tensor_bytes(info.dtype, info.shape) for info in model.inputs)
        return _HEADER_BYTES + rows * max(elements * _TEXT_BYTES, nbytes)

    # Inference

    async def infer(
        self,
        call: InferenceCall,
        began_s: float,
        submitted: Submitted = lambda futures: None,
    ) -> InferenceAnswer:
        """Run the request, which came at `began_s` (CLOCK_MONOTONIC); `submitted` is told its tasks.

        Raises:
            StageloomError: it cannot run, or one of its tasks did not complete; the others are cancelled.
            CancelledError: nobody wants the answer any more; its tasks are cancelled.
        """
        models = await self.models(call.model, call.version)
        try:
            try:
                return await self._run(self._chosen(models, call), call, began_s, submitted)
            except TaskRefused as error:
                if error.code not in LAYOUT_CODES:
                    raise
                await self.refresh()  # a plan has changed what the model takes or gives
                newer = await self.models(call.model, call.version)
                if newer == models:
                    raise
                return await self._run(self._chosen(newer, call), call, began_s, submitted)
        except (StageloomError, CancelledError):
            self.statistics.failed(call.model, versions_of(models)[-1], time.monotonic() - began_s)
            raise

    def _chosen(self, models: Sequence[ModelSignature], call: InferenceCall) -> ModelSignature:
        """The one of the models that runs a request in the fewest tasks; the only one whatever is asked.

        Raises:
            InputError: none of several takes it.
        """
        if len(models) == 1:
            return models[0]
        tried = [(_parts_or_refusal(model, call, self.most_rows), model) for model in models]
        fitting = [(parts, model) for parts, model in tried if isinstance(parts, int)]
        if fitting:
            return min(fitting, key=lambda one: one[0])[1]
        taken = " or ".join(", ".join(f"'{i.name}' {_taken(i)}" for i in m.inputs[:8]) for m in models[:8])
        raise InputError(f"model '{call.model}' takes {taken}; the first refuses because {tried[0][0]}")

    async def _run(
        self,
        model: ModelSignature,
        call: InferenceCall,
        began_s: float,
        submitted: Submitted,
    ) -> InferenceAnswer:
        parts = check_inputs(model, call, self.most_rows)
        wanted = _wanted(model, call, parts)
        tasks = await self._completed(
            parts, partial(self._submit, model, call, parts, wanted, began_s), submitted
        )
        results = [task.result() for task in tasks]
        outputs = [
            MadeOutput(
                one,
                PROTOCOL_NAMES[info.dtype],
                _rows_shape(results[0][index].shape, parts),
                None if one.region is not None else [result[index].elements for result in results],
            )
            for index, (one, info) in enumerate(wanted)
        ]
        rows = parts * (model.inputs[0].shape[0] if model.batchable else 1)
        self.statistics.succeeded(call.model, model.version, rows, tasks, began_s, time.monotonic())
        return InferenceAnswer(call, model.version, outputs)

    async def _completed(self, parts: int, submit: _Submit, submitted: Submitted) -> list[TaskFuture]:
        """The tasks of all parts, in rounds where there is no room for all at once.

        No round is larger than what the one before found room for: where the queue drops others for a new
        task, the parts would drop each other.
        """
        completed: dict[int, TaskFuture] = {}
        most = parts
        while len(completed) < parts:
            left = [part for part in range(parts) if part not in completed]
            found = await self._round(left[:most], submit, submitted)
            completed |= found
            most = len(found)
        return [completed[part] for part in range(parts)]

    async def _round(self, parts: list[int], submit: _Submit, submitted: Submitted) -> dict[int, TaskFuture]:
        """Run these parts; by part the tasks of those that found room, one at least: they have completed."""
        tasks: dict[int, TaskFuture] = {}
        try:
            _begin(parts, submit, tasks)
            submitted(list(tasks.values()))
            while True:
                try:
                    await self._waiting.results(list(tasks.values()))
                    return tasks
                except TaskRefused:
                    refused = [part for part, task in tasks.items() if _found_no_room(task)]
                    if len(refused) in (0, len(tasks)):
                        raise
                for part in refused:
                    del tasks[part]
        except BaseException:
            for task in tasks.values():
                task.cancel()
            raise

    def _submit(
        self,
        model: ModelSignature,
        call: InferenceCall,
        parts: int,
        wanted: Sequence[tuple[WantedOutput, Any]],
        began_s: float,
        part: int,
    ) -> TaskFuture:
        deadline_s = call.deadline_s
        if deadline_s is not None:
            deadline_s = max(deadline_s - (time.monotonic() - began_s), 0.0)
        inputs = {
            given.name: given.elements if parts == 1 else _part_of(given.elements, part, parts)
            for given in call.inputs
        }
        return self._client.submit(
            model.name,
            inputs,
            deadline_s=deadline_s,
            priority=call.priority,
            deliver=partial(_deliver, wanted, part),
        )


def check_inputs(model: ModelSignature, call: InferenceCall, most_rows: int) -> int:
    """In how many tasks the request is run: 1, or k of a batch that is k times as large as planned.

    Raises:
        InputError: inputs that the model does not take; the cause names what it takes.
    """
    given = {one.name: one for one in call.inputs}
    names = {info.name for info in model.inputs}
    if len(given) != len(call.inputs) or set(given) != names:
        raise InputError(
            f"expected inputs {', '.join(sorted(names))} for model '{model.name}', "
            f"got {', '.join(name[:64] for name in sorted(given)[:8]) or 'none'}"
        )
    parts: set[int] = set()
    for info in model.inputs:
        one = given[info.name]
        expected = PROTOCOL_NAMES[info.dtype]
        if one.datatype != expected:
            raise InputError(
                f"input '{info.name}' of model '{model.name}' is {expected}, not {one.datatype[:16]}"
            )
        parts.add(_times(one.shape, info.shape) if model.batchable else int(info.takes(one.shape)))
    number = parts.pop() if len(parts) == 1 else int(not model.inputs)
    if not 1 <= number <= most_rows:
        shapes = ", ".join(f"'{info.name}' {_taken(info)}" for info in model.inputs[:8])
        got = ", ".join(f"'{one.name}' {list(one.shape)}" for one in call.inputs[:8])
        more = f" or up to {most_rows} times as many rows" if model.batchable else ""
        raise InputError(f"model '{model.name}' takes {shapes}{more}, not {got}")
    return number


def _begin(parts: Sequence[int], submit: _Submit, tasks: dict[int, TaskFuture]) -> None:
    """Submit parts into `tasks` one after the other, up to the first that does not fit beside them."""
    try:
        for part in parts:
            tasks[part] = submit(part)
    except TaskRefused as error:
        if error.code not in _NO_ROOM or not tasks:
            raise


def _found_no_room(task: TaskFuture) -> bool:
    error = task.exception() if task.done() else None
    return isinstance(error, TaskRefused) and error.code in _NO_ROOM


def _parts_or_refusal(model: ModelSignature, call: InferenceCall, most_rows: int) -> int | InputError:
    try:
        return check_inputs(model, call, most_rows)
    except InputError as error:
        return error


def _taken(info: TensorInfo) -> str:
    return str(list(info.shape)) if info.smallest is None else info.shapes_text


def _times(shape: tuple[int, ...], planned: tuple[int, ...]) -> int:
    """How many times the planned rows a shape has; 0 if it is something else."""
    if shape == planned:
        return 1
    if not planned or len(shape) != len(planned) or shape[1:] != planned[1:] or not planned[0]:
        return 0
    return 0 if shape[0] % planned[0] else shape[0] // planned[0]


def _part_of(elements: TaskInput, part: int, parts: int) -> TaskInput:
    rows = elements.shape[0] // parts
    if isinstance(elements, RegionInput):
        return elements.rows(part * rows, rows)
    assert isinstance(elements, np.ndarray)
    return elements[part * rows : (part + 1) * rows]


def _rows_shape(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    return shape if parts == 1 else (shape[0] * parts, *shape[1:])


def _wanted(model: ModelSignature, call: InferenceCall, parts: int) -> list[tuple[WantedOutput, Any]]:
    """The outputs to give, each with what the model says of it.

    Raises:
        InputError: the model has no such output, or it does not fit into its region.
    """
    infos = {info.name: info for info in model.outputs}
    if call.outputs is None:
        return [(WantedOutput(name, call.binary), info) for name, info in infos.items()]
    found = []
    for one in call.outputs:
        info = infos.get(one.name)
        if info is None:
            have = ", ".join(infos)
            raise InputError(
                f"unexpected inference output '{one.name[:64]}' for model '{model.name}': {have}"
            )
        nbytes = parts * tensor_bytes(info.dtype, info.smallest or info.shape)
        if one.region is not None and one.nbytes < nbytes:
            raise _too_small(one, nbytes)
        found.append((one, info))
    return found


class _Delivered(NamedTuple):
    """One output of one task; `elements` are empty where they were written to a region."""

    shape: tuple[int, ...]
    elements: bytes


def _deliver(wanted: Sequence[tuple[WantedOutput, Any]], part: int, outputs: Outputs) -> list[_Delivered]:
    """Write one task's outputs where they are wanted, or copy them; in the thread that reads replies.

    Raises:
        TaskRefused: the outputs are not those that the model was said to have (code `signature_changed`).
        InputError: an output of open dimensions does not fit into its region.
    """
    made: list[_Delivered] = []
    for one, info in wanted:
        view = outputs.get(one.name)
        if view is None or view.dtype.name not in (info.dtype, _STANDS_FOR.get(info.dtype)):
            raise TaskRefused(
                "signature_changed",
                f"a new plan no longer gives output {one.name!r} as {PROTOCOL_NAMES[info.dtype]}",
                remedy="ask for the model's metadata and send the request again",
            )
        if one.region is None:
            made.append(_Delivered(view.shape, view.tobytes()))
            continue
        if one.nbytes < view.nbytes:
            raise _too_small(one, view.nbytes)
        one.region.write(view, one.region.place(one.offset + part * view.nbytes, view.nbytes))
        made.append(_Delivered(view.shape, b""))
    return made


def _too_small(one: WantedOutput, nbytes: int) -> InputError:
    assert one.region is not None
    return InputError(
        f"output '{one.name}' has {nbytes} bytes, its place in shared memory region "
        f"'{one.region.name}' {one.nbytes}"
    )
