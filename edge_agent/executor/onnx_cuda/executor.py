"""`onnx_cuda`: steps as runs of sessions on streams.

All steps are launched on one thread, in the core's order: onnxruntime's arenas are safe and bounded only so
(see `sessions`), and `issue` stays short.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import numpy as np

from stageloom.edge_agent.executor.base import (
    OperatorTime,
    SharedTable,
    TimingRequest,
    bucket_of,
    require_artifacts,
    require_options,
    require_pinned,
    require_whole,
)
from stageloom.edge_agent.executor.cuda.device import Launch, SessionDevice, Stream, streams_from
from stageloom.edge_agent.executor.cuda.executor import CudaExecutor
from stageloom.edge_agent.executor.cuda.layout import CallKind
from stageloom.edge_agent.executor.cuda.recipe import BoundProgram, BufferRole, MemberTensor
from stageloom.edge_agent.executor.onnx.cache import SessionCache, SessionKey
from stageloom.edge_agent.executor.onnx.executor import OnnxSession
from stageloom.edge_agent.executor.onnx.half import FP16, half_artifact
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.onnx_cuda.cuda import ENGINE_WORKSPACE_BYTES, CudaSessionDevice
from stageloom.edge_agent.executor.onnx_cuda.engines import BlockEngines
from stageloom.edge_agent.executor.onnx_cuda.recipe import (
    PlanMemory,
    PlanRecipes,
    SessionRecipe,
    block_keys,
    recipes_of,
    session_keys,
)
from stageloom.edge_agent.executor.onnx_cuda.sessions import (
    bound_run,
    open_device_session,
    run_options,
    session_bytes,
    time_operators,
    warm_up,
)
from stageloom.shared.artifact import Artifact
from stageloom.shared.bitmask import bits
from stageloom.shared.bound import BoundModel, BoundPlan
from stageloom.shared.engine.steps import MoveInstance, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import Digest, TensorId
from stageloom.shared.plan import Member

PRECISIONS = ("fp32", "tf32", FP16)
"""The models' own types; with tf32 products of float32 may be rounded to it first, with fp16 they are float16
within."""


@dataclass(frozen=True)
class _Loaded:
    recipes: PlanRecipes
    models: Sequence[BoundModel]  # with their own types
    memory: PlanMemory
    artifacts: Mapping[tuple[Digest, str], Artifact]  # by digest and precision, as sessions are cut of them
    alone: Mapping[tuple[int, int, int], BoundProgram]  # by combined block, position and bucket

    @property
    def bound(self) -> BoundPlan:
        return self.recipes.bound


class OnnxCudaExecutor(CudaExecutor[_Loaded]):
    """onnxruntime's CUDA kernels."""

    name = "onnx_cuda"

    def __init__(self, device: SessionDevice | None = None) -> None:
        """By default on CUDA's device 0; nothing takes its place.

        Raises:
            ExecutorError: this process cannot run sessions on CUDA.
        """
        self._sessions_on: SessionDevice = device or CudaSessionDevice()
        super().__init__(self._sessions_on, ThreadPoolExecutor(1, thread_name_prefix="launches"))
        self._weigh = partial(session_bytes, handle_bytes=self._sessions_on.handle_bytes)
        self._cache = SessionCache(make=partial(open_device_session, self._sessions_on), weigh=self._weigh)
        self._options = run_options()
        self._folder = TemporaryDirectory(prefix="stageloom-half-")
        self._half = SharedTable[Digest, Artifact]()  # models in half precision, by the digests of their own
        self._chooser = BlockEngines(self._sessions_on, self._options)
        self._engines = SharedTable[SessionKey, OnnxSession]()  # those that won
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="engines")  # each takes minutes
        self._binding = threading.Lock()  # between a program that is bound anew and a plan that is unloaded
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="programs")
        self._programs: dict[ProgramKey, BoundProgram] = {}

    # Plans and programs

    def stated_bytes(self, bound: BoundPlan, *, alone: bool = False) -> int:
        """Sessions that are not there yet, slots and arenas.

        Raises:
            ExecutorError: the precision is unknown.
        """
        self._check_options(bound)
        recipes = recipes_of(bound)
        sessions = self._session_bytes(recipes)
        missing = sum(size for key, size in sessions.items() if alone or self._cache.get(key) is None)
        engines = sum(
            size
            for key, size in self._engine_bytes(recipes).items()
            if alone or self._engines.get(key) is None
        )
        return missing + engines + recipes.memory_bytes

    def _check_options(self, bound: BoundPlan) -> None:
        require_options(bound, self.name, PRECISIONS)
        self._check_device_options(bound)

    @property
    def held_bytes(self) -> int:
        """What loaded plans state for sessions, kept sessions, slots and arenas."""
        sessions: dict[SessionKey, int] = {}
        engines: dict[SessionKey, int] = {}
        plans = list(self._plans.values())
        for loaded in plans:
            sessions |= self._session_bytes(loaded.recipes)
            engines |= self._engine_bytes(loaded.recipes)
        sessions |= self._cache.idle()
        return sum((*sessions.values(), *engines.values(), *(loaded.memory.nbytes for loaded in plans)))

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        """Take the plan's memory, make and warm up its sessions, bind what runs members one by one.

        Raises:
            ExecutorError: an option is unknown, an artifact is missing, the device has too little memory, or
                a session cannot be made.
        """
        self._check_options(bound)
        require_pinned(bound, self.name)
        require_whole(bound, self.name)
        require_artifacts(bound, artifacts)
        self._check_room(bound)
        recipes = recipes_of(bound)
        memory = PlanMemory(recipes, self._sessions_on)
        try:
            own = self._artifacts_of(key, bound, artifacts)
            self._hold(key, recipes.keys, own)
            alone = {place: self._bind(recipe, recipes, memory) for place, recipe in recipes.alone.items()}
            self._host.reserve(bound)
        except BaseException:
            self._cache.release(key)
            self._half.release(key)
            memory.free()
            raise
        self._plans[key] = _Loaded(recipes, bound.models, memory, own, alone)

    def _artifacts_of(
        self, plan: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]
    ) -> dict[tuple[Digest, str], Artifact]:
        """The artifacts in the precisions of the plan's models; those in half precision are made now.

        Raises:
            ExecutorError: a model cannot be converted.
        """
        own = {}
        for model, precision in zip(bound.models, bound.precisions, strict=True):
            artifact = artifacts[model.plan.artifact]
            if precision == FP16:
                path = Path(self._folder.name) / f"{artifact.digest}.artifact"
                artifact = self._half.hold(plan, artifact.digest, partial(half_artifact, artifact, path))
            own[model.plan.artifact, precision] = artifact
        return own

    def _hold(
        self,
        plan: PlanKey,
        keys: Collection[SessionKey],
        artifacts: Mapping[tuple[Digest, str], Artifact],
    ) -> None:
        """Have these sessions for a plan; new ones are warmed up."""

        def warm(key: SessionKey, session: OnnxSession) -> None:
            graph = artifacts[key.artifact, key.precision].graph
            warmed = self._preparer.submit(warm_up, session, key, graph, self._sessions_on, self._options)
            warmed.result()

        for precision in sorted({key.precision for key in keys}):
            of = {digest: artifact for (digest, own), artifact in artifacts.items() if own == precision}
            self._cache.hold_all(plan, [key for key in keys if key.precision == precision], of, warm)

    def _bind(
        self,
        recipe: SessionRecipe,
        recipes: PlanRecipes,
        memory: PlanMemory,
        engines: Mapping[SessionKey, OnnxSession] = MappingProxyType({}),
    ) -> BoundProgram:
        """Bind every session of a recipe, or the engine that takes its place, to the plan's memory.

        Raises:
            ExecutorError: the plan's memory is too small, or a session is missing.
        """
        memory.check(recipe)
        device = self._sessions_on
        stream = device.stream(recipes.first_stream(recipe.combined))
        launches: list[tuple[Launch, ...]] = []
        for call, key in zip(recipe.calls, recipe.kernels, strict=True):
            part = recipe.parts[(*call.reads, *call.makes)[0].position]
            places = {value: memory.address(recipe, value) for value in (*call.reads, *call.makes)}
            if key is not None:
                session = engines.get(key) or self._cache.get(key)
                if session is None:
                    raise ExecutorError(
                        f"no session for {len(key.ops)} operators of {key.artifact[:12]} is loaded"
                    )
                addresses = {value.tensor: address for value, address in places.items()}
                graph = part.model.graph
                launches.append((bound_run(session, graph, part.batch, addresses, device, self._options),))
            elif call.kind is CallKind.VIEW:
                launches.append(())
            else:
                (source,), (target,) = call.reads, call.makes
                nbytes = part.batch * part.model.graph.tensors[source.tensor].nbytes
                launches.append((device.copying(stream, places[target], places[source], nbytes),))
        return BoundProgram(recipe, tuple(launches))

    def prepare(self, program: ProgramKey) -> None:
        """Bind the program's sessions; those that only this mask needs are made now.

        Engines of whole blocks are built behind that, and take the sessions' places when they have won.

        Raises:
            ExecutorError: a session cannot be made, or the plan's memory is too small.
        """
        if program in self._programs:
            return
        loaded = self._plans[program.plan]
        buckets = dict(zip(bits(program.mask), program.buckets, strict=True))
        recipe = loaded.recipes.recipe(program.combined, buckets)
        self._hold(program.plan, session_keys(recipe), loaded.artifacts)
        self._programs[program] = self._bind(recipe, loaded.recipes, loaded.memory)
        sources = {
            key: ModelParts(loaded.artifacts[key.artifact, key.precision])
            for key in block_keys(recipe)
            if self._chooser.builds(key.precision)
        }
        if sources:
            self._builder.submit(self._build_engines, program, recipe, loaded, sources)

    def _build_engines(
        self,
        program: ProgramKey,
        recipe: SessionRecipe,
        loaded: _Loaded,
        sources: Mapping[SessionKey, ModelParts],
    ) -> None:
        """Bind a program anew to the engines that win; nothing if its plan was unloaded meanwhile."""
        found: dict[SessionKey, OnnxSession] = {}
        for key, source in sources.items():
            plain, engine = self._cache.get(key), self._engines.get(key)
            if plain is None or self._plans.get(program.plan) is not loaded:
                return
            if engine is None:
                engine = self._chooser.faster(key, plain, source)
            if engine is not None:
                found[key] = engine
        with self._binding:
            if found and self._plans.get(program.plan) is loaded:
                own = {
                    key: self._engines.hold(program.plan, key, partial(_same, engine))
                    for key, engine in found.items()
                }
                self._programs[program] = self._bind(recipe, loaded.recipes, loaded.memory, own)

    def await_engines(self) -> None:
        """Block until the engines of all programs so far are built."""
        self._builder.submit(lambda: None).result()

    def unload(self, key: PlanKey) -> None:
        """Free a plan's memory once nothing on the device uses it; some sessions are kept for its return."""
        with self._binding:
            loaded = self._plans.pop(key, None)
            for program in [program for program in list(self._programs) if program.plan == key]:
                del self._programs[program]
        if loaded is not None:
            self._await_moves()
            loaded.memory.free()
        self._engines.release(key)
        self._cache.release(key)
        self._half.release(key)

    def drop_idle(self) -> None:
        """Free the sessions that no loaded plan holds."""
        self._cache.drop_idle()

    def close(self) -> None:
        """Free everything and end the threads; an engine that is being built is waited for.

        The device goes with it: one is made for every executor, and profiles make many.
        """
        self._builder.shutdown(cancel_futures=True)
        super().close()
        self._cache.drop_idle()
        self._preparer.shutdown()
        self._sessions_on.close()  # steps have ended, and sessions and threads are gone
        self._folder.cleanup()

    # What a step runs, and where its tensors lie

    def _streams(self, step: Step) -> Sequence[Stream]:
        recipes = self._plans[step.program.plan].recipes
        return streams_from(self._on, recipes.first_stream(step.program.combined), recipes.width)

    def _program(self, key: ProgramKey) -> BoundProgram:
        return self._programs[key]

    def _alone(self, step: Step, member: StepMember) -> BoundProgram:
        loaded = self._plans[step.program.plan]
        return loaded.alone[step.program.combined, member.position, bucket_of(step, member)]

    def _array(self, piece: np.ndarray) -> np.ndarray:
        return piece

    def _as_modelled(
        self, plan: _Loaded, member: Member, arrays: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        types = {tensor.name: tensor.dtype for tensor in plan.models[member.model].graph.tensors}
        return {name: array.astype(types[name], copy=False) for name, array in arrays.items()}

    def _copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        self._on.launch(stream, self._sessions_on.copying(stream, target, source, nbytes))

    def _copy_in(
        self, stream: Stream, plan: _Loaded, member: Member, tensor: TensorId, rows: int, piece: np.ndarray
    ) -> None:
        nbytes = rows * plan.bound.models[member.model].graph.tensors[tensor].nbytes
        self._copy(stream, plan.memory.slot(member, tensor), piece.ctypes.data, nbytes)

    def _copy_out(
        self,
        stream: Stream,
        plan: _Loaded,
        program: BoundProgram,
        member: StepMember,
        tensor: TensorId,
        piece: np.ndarray,
    ) -> None:
        nbytes = len(member.tasks) * plan.bound.models[member.member.model].graph.tensors[tensor].nbytes
        inner = MemberTensor(member.position, tensor)
        made_here = member.last and inner in program.recipe.layout.offsets
        value = inner if made_here else inner._replace(role=BufferRole.HOME)
        self._copy(stream, piece.ctypes.data, plan.memory.address(program.recipe, value), nbytes)

    def _copy_slot(self, stream: Stream, action: MoveInstance, tensor: TensorId, rows: int) -> None:
        (old_key, old), (new_key, new) = action.old, action.new
        source, target = self._plans[old_key], self._plans[new_key]
        if source.bound.precisions[old.model] != target.bound.precisions[new.model]:
            raise ExecutorError(
                "the new plan has the model in another precision", remedy="let tasks end first"
            )
        nbytes = rows * source.bound.models[old.model].graph.tensors[tensor].nbytes
        self._copy(stream, target.memory.slot(new, tensor), source.memory.slot(old, tensor), nbytes)

    def time_operators(
        self, artifact: Artifact, request: TimingRequest, idle: Callable[[], bool]
    ) -> tuple[OperatorTime, ...]:
        """Run the model operator by operator; see `sessions.time_operators`. [num_operators]

        Raises:
            ExecutorError: an operator cannot run alone.
        """
        device, options = self._sessions_on, self._options
        return self._preparer.submit(time_operators, artifact, request, idle, device, options).result()

    def _session_bytes(self, recipes: PlanRecipes) -> dict[SessionKey, int]:
        graphs = {model.plan.artifact: model.graph for model in recipes.bound.models}
        return {key: self._weigh(key, graphs[key.artifact]) for key in recipes.keys}

    def _engine_bytes(self, recipes: PlanRecipes) -> dict[SessionKey, int]:
        """What engines that may win take beside the plain sessions, which stay for fallbacks."""
        return {
            key: size + ENGINE_WORKSPACE_BYTES
            for key, size in self._session_bytes(recipes).items()
            if key in recipes.blocks and self._chooser.may_win(key)
        }


def _same(engine: OnnxSession) -> OnnxSession:
    return engine
