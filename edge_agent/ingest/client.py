"""The library that applications import: submit tasks to the agent of this machine.

    from stageloom import Client

    with Client() as client:
        future = client.submit("resnet50", {"input": array}, deadline_s=0.5)
        outputs = future.result(timeout=5.0)  # {"output": array}

A client may be used from any number of threads. Tensors travel through shared memory: `submit` copies the
inputs there and returns; results are copies that belong to the caller. A task runs at most once: when the
engine or the agent restarts, its future raises `AgentRestarted` and nothing is sent again by itself. After a
restart of the agent the next call connects again.
"""

import contextlib
import itertools
import operator
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime  # Python's own only from 3.11 on
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from stageloom.edge_agent.ingest import channel
from stageloom.edge_agent.ingest.channel import default_socket
from stageloom.edge_agent.ingest.client_memory import (
    ArenaPool,
    InputSource,
    LayoutPool,
    Outputs,
    Shapes,
    TaskInput,
    TaskLayout,
    kind_of,
)
from stageloom.edge_agent.ingest.client_outbox import Outbox
from stageloom.edge_agent.ingest.messages import (
    LONGEST_S,
    MAX_PACKET_BYTES,
    MAX_PRIORITY,
    MAX_SHARED_MODELS,
    PROTOCOL_VERSION,
    AgentWelcome,
    CancelRequest,
    ClientHello,
    Goodbye,
    ListModels,
    Models,
    ModelSignature,
    SubmitRequest,
    TaskEnded,
    ToAgent,
    ToApplication,
    decode_to_application,
    encode,
)
from stageloom.edge_agent.ingest.signature import LAYOUT_CODES, by_any_name, choose_shapes
from stageloom.shared.errors import (
    AgentRestarted,
    DecodeError,
    InputError,
    RefusedError,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskRefused,
    UnavailableError,
)

Deliver: TypeAlias = Callable[[Outputs], Any]
"""Makes a result of outputs in shared memory, which are another task's once it returns."""

_DOUBTING: Final = LAYOUT_CODES | {"model_changed", "model_removed"}
"""Codes of refusals after which the models, or the application's tasks, may be out of date."""


class TaskFuture(Future[Any]):
    """A task's result to come: outputs by tensor name, for a shared task by model and then by tensor name.

    `result` raises `TaskRefused`, `TaskExpired`, `TaskCancelled`, `TaskFailed`, `AgentRestarted`, or
    `TimeoutError` if the time given to it runs out first. Once it is done, `received_at_s`, `queued_at_s`,
    `started_at_s` and `ended_at_s` are the instants (CLOCK_MONOTONIC) when the agent read the task, when the
    engine queued it, when its first step began and when it ended; 0 where it did not get that far.
    """

    def __init__(self, session: "_Session", task: int, deliver: Deliver | None = None) -> None:
        super().__init__()
        self._session = session
        self._task = task
        self._deliver = deliver
        self.received_at_s = 0.0
        self.queued_at_s = 0.0
        self.started_at_s = 0.0
        self.ended_at_s = 0.0

    def cancel(self) -> bool:
        """Ask the agent to drop the task; False if it has ended. `result` then raises `TaskCancelled`."""
        if self.done():
            return False
        self._session.cancel(self._task)
        return True

    def deliver(self, layout: TaskLayout, shapes: Shapes) -> Any:
        """The result of a task that completed in this layout, in the thread that reads replies."""
        if self._deliver is None:
            return layout.outputs(shapes)
        return self._deliver(layout.output_views(shapes))


class Client:
    """A connection to the agent of this machine.

    Args:
        path: the agent's socket; default `$STAGELOOM_AGENT_SOCKET`, else `run/agent.sock` in its home.
        timeout_s: how long connecting, asking and handing over may take before `UnavailableError`. An agent
            that takes nothing for so long counts as gone: its open tasks raise `AgentRestarted`.

    Raises:
        UnavailableError: no agent answers.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, timeout_s: float = 5.0) -> None:
        self._path = Path(path) if path is not None else default_socket()
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._session: _Session | None = _Session(self._path, timeout_s)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what has not ended and disconnect."""
        with self._lock:
            self._closed = True
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def models(self) -> dict[str, ModelSignature]:
        """What can be run now, by the plan's names: a model of several shapes has one for each."""
        return self._live().fetch_models()

    def submit(
        self,
        model: str | Sequence[str],
        inputs: Mapping[str, TaskInput],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
        deliver: Deliver | None = None,
    ) -> TaskFuture:
        """Hand a task over; several model names share one input and make one task.

        Args:
            inputs: arrays or what is read into one, by tensor name, with the model's type and a shape that
                it takes.
            deadline_s: seconds from now after which the result is worthless (`TaskExpired`).
            priority: higher runs earlier where the plan's queue rule says so.
            deliver: of one model's outputs by name makes the result, without a copy between; it is called in
                the thread that reads replies and must return soon. None: copies of them are the result.

        Raises:
            InputError: no task could have that deadline, that priority or so many models.
            TaskRefused: it does not fit into shared memory, or the agent knows no such model, or none at all.
            UnavailableError: the agent is gone and does not come back within the timeout, or it takes
                nothing within it.
        """
        sent_at_s = time.monotonic()
        # The agent ends the connection, and with it every open task, over what it cannot read.
        if deadline_s is not None and not 0.0 <= deadline_s <= LONGEST_S:  # false for NaN, too
            raise InputError(
                f"a deadline in {deadline_s:g} s is impossible",
                remedy=f"give 0 to {LONGEST_S:g} seconds from now, or none",
            )
        names = (model,) if isinstance(model, str) else tuple(model)
        if not 1 <= len(names) <= MAX_SHARED_MODELS:
            raise InputError(
                f"a task for {len(names)} models is impossible",
                remedy=f"name 1 to {MAX_SHARED_MODELS} of them",
            )
        deadline_s = None if deadline_s is None else float(deadline_s)  # which may be numpy's
        return self._live().submit(names, inputs, sent_at_s, deadline_s, _priority(priority), deliver)

    def run(
        self,
        model: str | Sequence[str],
        inputs: Mapping[str, TaskInput],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Any:
        """`submit`, and the result within `timeout_s`. Raises as `submit` and `TaskFuture`."""
        return self.submit(model, inputs, deadline_s=deadline_s, priority=priority).result(timeout_s)

    def _live(self) -> "_Session":
        with self._lock:
            if self._closed:
                raise UnavailableError("this client is closed", remedy="make a new one")
            if self._session is None or self._session.gone:
                self._session = _Session(self._path, self._timeout_s)
            return self._session


class _Session:
    """One life of a connection: a socket, its arenas, a thread that reads replies."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sock = channel.connect(path, timeout_s)
        self._lock = threading.Lock()
        self._tasks = itertools.count()
        self._requests = itertools.count()
        self._pending: dict[int, tuple[TaskFuture, TaskLayout]] = {}
        self._answers: dict[int, Future[Models]] = {}
        self._infos: dict[str, ModelSignature] = {}
        self._why_none = ""  # where the agent has told no models
        self._doubts = 0  # ends of tasks that may come of a new plan
        self._settled = 0  # how many of them had come when the agent was last asked for the models
        self._put_off: deque[ToApplication | None] = deque()  # read, and not taken yet; None: the end
        self.gone = False
        self._goodbye = ""
        arenas = self._greet(path)
        self._outbox = Outbox(self._sock, timeout_s)
        self._layouts = LayoutPool(arenas, self._put)
        self._reader = threading.Thread(target=self._read, name="stageloom-client", daemon=True)
        self._reader.start()

    def _greet(self, path: Path) -> ArenaPool:
        try:
            self._sock.send(encode(ClientHello(PROTOCOL_VERSION)))
            packet, _ = channel.receive(self._sock)
            answer = decode_to_application(packet)
        except (OSError, DecodeError) as error:
            self._sock.close()
            raise UnavailableError(f"the agent at {path} does not answer: {error}") from error
        if not isinstance(answer, AgentWelcome):
            self._sock.close()
            reason = answer.reason if isinstance(answer, Goodbye) else "an unexpected answer"
            raise UnavailableError(f"the agent at {path} turned this application away: {reason}")
        return ArenaPool(answer.max_arena_bytes, answer.max_arenas)

    def fetch_models(self) -> dict[str, ModelSignature]:
        """Ask for all models, page by page."""
        doubts = self._doubts
        found: dict[str, ModelSignature] = {}
        more = True
        while more:
            request = next(self._requests)
            answer: Future[Models] = Future()
            with self._lock:
                self._check_alive()
                self._answers[request] = answer
            self._send(ListModels(request, len(found)))
            part = self._part(answer)
            found.update((info.name, info) for info in part.models)
            self._why_none = part.why_none
            more = part.more and bool(part.models)
        if found != self._infos:
            self._infos = found
            self._layouts.invalidate()
            with contextlib.suppress(UnavailableError):  # an agent that is gone has forgotten the layouts
                self._push()
        self._settled = doubts
        return found

    def _part(self, answer: Future[Models]) -> Models:
        """One page of models, once it has come.

        Raises:
            UnavailableError: it does not come in time.
        """
        try:
            if threading.current_thread() is not self._reader:
                return answer.result(self._timeout_s)
            self._read_until(answer)  # a task's callback asks: nobody else reads meanwhile
            return answer.result(0.0)
        except NotInTime as error:
            raise UnavailableError(f"the agent did not answer within {self._timeout_s} s") from error

    def submit(
        self,
        names: tuple[str, ...],
        inputs: Mapping[str, TaskInput],
        sent_at_s: float,
        deadline_s: float | None,
        priority: int,
        deliver: Deliver | None,
    ) -> TaskFuture:
        """`sent_at_s` is when `Client.submit` was called; `deadline_s` counts from it."""
        given = {
            name: value if isinstance(value, InputSource) else np.asarray(value)
            for name, value in inputs.items()
        }
        if self._settled != self._doubts:
            self.fetch_models()
        kind = kind_of(names, given)
        layout = self._layouts.take(kind) or self._layouts.make(kind, self._known(names, given))
        try:
            for view, value in zip(layout.inputs, given.values(), strict=True):
                if isinstance(value, InputSource):
                    value.read_into(view)
                else:
                    np.copyto(view, value)
        except BaseException:
            self._layouts.give_back(layout)
            raise
        with self._lock:  # task numbers must reach the agent in rising order
            self._check_alive()
            task = next(self._tasks)
            future = TaskFuture(self, task, deliver)
            request = SubmitRequest(task, layout.number, sent_at_s, priority, deadline_s)
            self._outbox.put(encode(request))
            self._pending[task] = future, layout
        self._push()
        return future

    def _known(self, names: tuple[str, ...], given: Mapping[str, TaskInput]) -> tuple[ModelSignature, ...]:
        """The models that the names mean for these inputs; the agent is asked for them anew before a refusal.

        Raises:
            TaskRefused: there is none at all, none of a name, or none of several takes the shapes.
            UnavailableError: the agent does not answer.
        """
        shapes = {name: tuple(value.shape) for name, value in given.items()}
        try:
            return self._chosen(names, shapes)
        except TaskRefused:
            self.fetch_models()  # a new plan may serve other names, or other shapes of a name
        return self._chosen(names, shapes)

    def _chosen(
        self, names: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[ModelSignature, ...]:
        known = by_any_name(self._infos.values())
        if not known:
            raise TaskRefused(
                "not_ready", self._why_none or "no plan is active", remedy="see `stageloom-agent status`"
            )
        try:
            return tuple(choose_shapes(name, known[name], shapes) for name in names)
        except KeyError as error:
            have = ", ".join(sorted(self._infos)[:8]) or "none"
            raise TaskRefused(
                "unknown_model",
                f"no model {error.args[0]!r} runs here",
                remedy=f"models of the active plan: {have}",
            ) from None

    def cancel(self, task: int) -> None:
        """Tell the agent; whatever ends the task answers its future."""
        with contextlib.suppress(UnavailableError):  # then the future has been answered already
            self._send(CancelRequest(task))

    def _send(self, message: ToAgent) -> None:
        self._put(message, None)
        self._push()

    def _put(self, message: ToAgent, descriptor: int | None) -> None:
        """To be sent before whatever is sent next."""
        self._outbox.put(encode(message), descriptor)

    def _push(self) -> None:
        """Send what was put into the outbox. A callback, in the reader's thread, does not wait for room.

        Without the lock, as callbacks of tasks that end here may send.

        Raises:
            UnavailableError: the agent is gone, or takes nothing within the timeout.
        """
        try:
            if threading.get_ident() == self._reader.ident:
                self._outbox.flush()  # `_receive` sends the rest
            else:
                self._outbox.send()
        except UnavailableError:
            self._end(self._outbox.failure)
            raise

    def _check_alive(self) -> None:
        if self.gone:
            raise self._is_gone()

    def _is_gone(self) -> UnavailableError:
        return UnavailableError(f"the agent is gone: {self._goodbye or 'the connection ended'}")

    def _read(self) -> None:
        while True:
            message = self._put_off.popleft() if self._put_off else self._receive()
            if message is None:
                break
            self._take(message)
        self._end(self._goodbye or self._outbox.failure)
        self._outbox.close()

    def _receive(self) -> ToApplication | None:
        """The next message from the socket; None: the connection is over."""
        try:
            if self._is_full() and not self._is_readable(self._timeout_s) and self._is_full():
                self._outbox.give_up()
            packet = self._sock.recv(MAX_PACKET_BYTES + 1)  # one byte more than decoding takes
            return decode_to_application(packet) if packet else None
        except (OSError, DecodeError) as error:
            self._goodbye = self._goodbye or str(error)
            return None

    def _is_full(self) -> bool:
        """Whether packets are left that the socket does not take now; it is given the others."""
        try:
            return self._outbox.flush()
        except UnavailableError:
            return False  # what the agent has sent before is read yet

    def _is_readable(self, within_s: float) -> bool:
        """In the reader's thread: wait for something to read, and send meanwhile what the socket takes."""
        deadline_s = time.monotonic() + within_s
        ready = select.poll()
        while True:
            ready.register(self._sock, select.POLLIN | (select.POLLOUT if self._is_full() else 0))
            events = ready.poll(max(deadline_s - time.monotonic(), 0.0) * 1e3)
            if not events or events[0][1] != select.POLLOUT:
                return bool(events)

    def _read_until(self, answer: Future[Models]) -> None:
        """In the reader's thread: read until the answer or the timeout has come.

        Tasks that end meanwhile wait for `_read`: their callbacks may ask for models, too, and would do so
        inside of each other.

        Raises:
            UnavailableError: the connection is over.
        """
        deadline_s = time.monotonic() + self._timeout_s
        while not answer.done() and self._is_readable(deadline_s - time.monotonic()):
            message = self._receive()
            if isinstance(message, Models | Goodbye):
                self._take(message)
                continue
            self._put_off.append(message)
            if message is None:
                raise self._is_gone()

    def _take(self, message: ToApplication) -> None:
        match message:
            case TaskEnded():
                with self._lock:
                    pending = self._pending.pop(message.task, None)
                if pending is not None:
                    self._finish(*pending, message)
            case Models():
                with self._lock:
                    answer = self._answers.pop(message.request, None)
                if answer is not None:
                    answer.set_result(message)
            case Goodbye():
                self._goodbye = message.reason

    def _finish(self, future: TaskFuture, layout: TaskLayout, ended: TaskEnded) -> None:
        future.received_at_s, future.queued_at_s = ended.received_at_s, ended.queued_at_s
        future.started_at_s, future.ended_at_s = ended.started_at_s, ended.ended_at_s
        try:
            if ended.outcome == "completed":
                try:
                    result = future.deliver(layout, ended.shapes)
                finally:  # a plan may have pinned or opened a model
                    self._put_back(layout, doubted=not layout.fits(ended.shapes))
                future.set_result(result)
                return
            self._put_back(layout, doubted=ended.code in _DOUBTING)
            future.set_exception(_error_of(ended))
        except Exception as error:  # a result that cannot be read must not end the reader
            future.set_exception(error)

    def _put_back(self, layout: TaskLayout, *, doubted: bool) -> None:
        """`doubted`: a new plan may want another layout, so the models are asked for before the next task."""
        if doubted:
            self._doubts += 1
            self._layouts.discard(layout)
        else:
            self._layouts.give_back(layout)

    def _end(self, why: str) -> None:
        """The connection is over: everything still open is answered, once."""
        with self._lock:
            if self.gone:
                return
            self.gone = True
            self._goodbye = self._goodbye or why
            pending, self._pending = self._pending, {}
            answers, self._answers = self._answers, {}
        for future, _ in pending.values():
            future.set_exception(
                AgentRestarted(
                    f"the agent went away: {self._goodbye or 'the connection ended'}",
                    remedy="the task may have run; submit it again if wanted",
                )
            )
        for answer in answers.values():
            answer.set_exception(UnavailableError("the agent went away", remedy="try again"))
        self._layouts.close()

    def close(self) -> None:
        """Leave; open tasks raise `TaskCancelled`."""
        with self._lock:
            pending, self._pending = self._pending, {}
        for future, _ in pending.values():
            future.set_exception(TaskCancelled("the client was closed"))
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was gone already
        if threading.current_thread() is not self._reader:
            self._reader.join(self._timeout_s)


def _priority(given: Any) -> int:
    """Raises:
    InputError: it is no whole number, or no task could have it.
    """
    with contextlib.suppress(TypeError):
        if abs(priority := operator.index(given)) <= MAX_PRIORITY:
            return priority
    raise InputError(
        f"a priority of {str(given)[:40]} is impossible",
        remedy=f"give a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}",
    )


def _error_of(ended: TaskEnded) -> RefusedError:
    cause, _, remedy = ended.reason.partition("; ")
    if ended.code == "agent_restarted":
        return AgentRestarted(cause, remedy=remedy)
    match ended.outcome:
        case "refused":
            return TaskRefused(ended.code, cause, remedy=remedy)
        case "expired":
            return TaskExpired(cause or "the deadline passed before the result")
        case "cancelled":
            return TaskCancelled(cause or "cancelled by its owner")
        case _:
            return TaskFailed(cause or "the executor failed", remedy=remedy)
