"""Models loaded into the runtimes that options name, for threads that call them."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from stageloom.edge_agent.bench.model_files import Feeds, ModelUnderTest, median_s
from stageloom.edge_agent.bench.rival_threads import Runtime
from stageloom.edge_agent.bench.runtime_options import RuntimeName, RuntimeOptions

_QUIET: Final = 3  # errors only
_SAMPLES: Final = 2
_LOOKS: Final = 4  # as first sight: a core that is shared is slower for a second or two, now and then
_MOST: Final = 4.0
"""No further look begins at a slow model that has had so many times the seconds that it should take."""

Call = Callable[[Feeds], object]


class LoadedModels:
    """Per worker and model what to call."""

    def __init__(self, calls: Sequence[Sequence[Call]]) -> None:
        self._calls = calls

    def run(self, worker: int, model: int, feeds: Feeds) -> object:
        """Run a model for one worker."""
        return self._calls[worker][model](feeds)


def load_runtime(options: RuntimeOptions, models: Sequence[ModelUnderTest]) -> Runtime:
    """The models as the options say. OpenVINO's requests serve one worker, and an onnxruntime session all of
    them, unless it has several threads: all callers share these, so each worker has a session of its own.

    Raises:
        Exception: a runtime does not take a model; runtimes' exceptions share no base class.
    """
    workers = options.workers or len(models)
    rows: list[list[Call]] = [[] for _ in range(workers)]
    for index, model in enumerate(models):
        for worker, call in enumerate(_calls(options, model, workers, index)):
            rows[worker].append(call)
    return LoadedModels(rows)


def _calls(options: RuntimeOptions, model: ModelUnderTest, workers: int, index: int) -> list[Call]:
    if options.runtime_of(model.name) is RuntimeName.ONNXRUNTIME:
        sessions = options.workers if options.threads > 1 else 1
        calls = [
            onnxruntime_call(model.path, options.threads, spinning=options.spinning)
            for _ in range(max(sessions, 1))
        ]
        return calls * (workers // len(calls))
    if options.runtime_of(model.name) is RuntimeName.CUDA:
        return [cuda_call(model.path, tf32=not options.float32)] * workers
    from stageloom.edge_agent.bench.openvino_rival import compiled_call, properties_of

    properties = properties_of(options)
    if options.workers:
        return [compiled_call(model.path, properties) for _ in range(workers)]
    own = compiled_call(model.path, properties)
    return [own if worker == index else _never for worker in range(workers)]


def _never(feeds: Feeds) -> object:
    raise AssertionError("a worker runs its own model only")


def onnxruntime_call(path: Path, threads: int, *, spinning: bool) -> Call:
    """A session; 0 threads are onnxruntime's default, as many as there are cores.

    Raises:
        Exception: onnxruntime does not take the model.
    """
    import onnxruntime

    wanted = onnxruntime.SessionOptions()
    wanted.log_severity_level = _QUIET
    if threads:
        wanted.intra_op_num_threads = threads
    if not spinning:
        wanted.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(path), wanted, providers=["CPUExecutionProvider"])
    return partial(session.run, None)


def cuda_call(path: Path, *, tf32: bool) -> Call:
    """A session on the GPU as it comes; `tf32`: products in TF32, which is onnxruntime's default.

    Raises:
        Exception: onnxruntime does not take the model, or has no GPU.
    """
    import onnxruntime

    onnxruntime.preload_dlls()  # CUDA and cuDNN from wheels
    wanted = onnxruntime.SessionOptions()
    wanted.log_severity_level = _QUIET
    provider = ("CUDAExecutionProvider", {"use_tf32": int(tf32)})
    session = onnxruntime.InferenceSession(str(path), wanted, providers=[provider, "CPUExecutionProvider"])
    if "CUDAExecutionProvider" not in session.get_providers():
        raise RuntimeError("onnxruntime took the processor in the GPU's place: a library of CUDA is missing")
    return partial(session.run, None)


def service_times_s(
    models: Sequence[ModelUnderTest],
    options: RuntimeOptions,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Mapping[str, float | str]:
    """Per model the seconds of one run by one worker, or why the runtime does not take it.

    Some looks at each model, in turns, that last `seconds` together; fewer where the model is too slow for
    it. The shortest counts, as whatever disturbs a look adds to it. To be called in a process that runs
    nothing else.
    """
    timed = [_Timed(options, model, clock) for model in models]
    for _ in range(_LOOKS):
        for one in timed:
            if one.spent_s < _MOST * seconds:
                one.look(seconds / _LOOKS)
    return {one.name: one.reason or one.shortest_s for one in timed}


class _Timed:
    """One model in a runtime, and the shortest look at it."""

    def __init__(self, options: RuntimeOptions, model: ModelUnderTest, clock: Callable[[], float]) -> None:
        self.name = model.name
        self.shortest_s = math.inf
        self.spent_s = 0.0  # in looks
        self.reason = ""  # why the runtime does not take it
        self._clock = clock
        self._call: Call | None = None
        try:
            self._call = partial(load_runtime(options, [model]).run, 0, 0)
            self._feeds = model.feeds(_SAMPLES)
        except Exception as error:  # runtimes' exceptions share no base class
            self.reason = _line(error)

    def look(self, seconds: float) -> None:
        if self._call is None or self.reason:
            return
        began_s = self._clock()
        try:
            self.shortest_s = min(self.shortest_s, median_s(self._call, self._feeds, seconds, self._clock))
        except Exception as error:  # as above
            self.reason = _line(error)
        self.spent_s += self._clock() - began_s


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
