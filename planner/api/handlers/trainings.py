"""Trainings and checks of learned policies, in processes of their own; the planner keeps what they leave."""

import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiCall, ApiContext, handles
from stageloom.planner.api.jobs import Job, JobCancelled
from stageloom.planner.api.problem import ApiRefused
from stageloom.planner.api.work import changed
from stageloom.planner.learning.kept_run import forget_run
from stageloom.planner.learning.messages import (
    Checked,
    Trained,
    TrainingFailed,
    TrainingMessage,
    TrainingStep,
    TrainingTask,
)
from stageloom.planner.schema import training as schema
from stageloom.planner.schema.access import Role
from stageloom.planner.schema.policy import PolicyCheckRequest, PolicyVerdict
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.models import model_infos, named_models
from stageloom.planner.store.plans import keep_plan
from stageloom.planner.store.policies import digest_beginning, keep_verdict, require_gated, store_policy
from stageloom.shared.errors import InputError, RefusedError, UnavailableError
from stageloom.shared.module_command import module_command
from stageloom.shared.plan import decode_plan

_COMMAND: Final = module_command("stageloom.planner.learning.worker")
_END_S: Final = 30.0  # for its workers to end


@handles(routes.TRAIN_GPG)
def train_gpg(api: ApiContext, request: schema.GpgTrainingRequest, call: ApiCall) -> object:
    if not request.imitation_steps + request.episodes:
        raise InputError("nothing to train", remedy="give imitation steps or episodes above 0")
    if request.device is not None:
        api.reader.read(device_info, request.device)
    if request.models:
        api.reader.read(named_models, list(request.models))
    elif not api.reader.read(model_infos, limit=1):
        raise InputError(
            "the planner has no models to learn from", remedy="add some with `stageloom model add`"
        )
    return partial(_gpg, api, request)


@handles(routes.TRAIN_MADDPG)
def train_maddpg(api: ApiContext, request: schema.MaddpgTrainingRequest, call: ApiCall) -> object:
    own = ("", "local", api.config.ray_address)
    if request.ray_address not in own and not call.principal.may(Role.ADMIN):
        raise RefusedError(
            "only an admin may have the planner join another Ray cluster",
            remedy="leave it out, or start the planner with --ray-address",
        )
    api.reader.read(device_info, request.device)  # known before a job begins
    return partial(_maddpg, api, request)


@handles(routes.POLICY_CHECK)
def policy_check(api: ApiContext, request: PolicyCheckRequest, call: ApiCall) -> object:
    api.reader.read(require_gated, api.reader.read(digest_beginning, request.policy))
    if request.device is not None:
        api.reader.read(device_info, request.device)
    return partial(_check, api, request)


def _check(api: ApiContext, request: PolicyCheckRequest, job: Job) -> PolicyVerdict:
    checked = _left(api, TrainingTask(data_dir=_folder(api), check=request), job, Checked)
    changed(api, keep_verdict, checked.verdict)
    return checked.verdict


def _gpg(api: ApiContext, request: schema.GpgTrainingRequest, job: Job) -> schema.GpgTrainingReply:
    trained = _left(api, TrainingTask(data_dir=_folder(api), gpg=request), job, Trained)
    assert trained.gpg is not None
    _keep_policy(api, trained)
    _forget(trained)
    return trained.gpg


def _maddpg(api: ApiContext, request: schema.MaddpgTrainingRequest, job: Job) -> schema.MaddpgTrainingReply:
    trained = _left(api, TrainingTask(data_dir=_folder(api), maddpg=request), job, Trained)
    assert trained.maddpg is not None
    _keep_policy(api, trained, unchecked=request.unchecked)
    plan = changed(api, keep_plan, decode_plan(trained.plan), trained.policy)
    _forget(trained)
    return msgspec.structs.replace(trained.maddpg, plan=plan)


def _forget(trained: Trained) -> None:
    """Only now: a planner that is killed before, or whose disk is full, goes on from the last validation."""
    if trained.run:
        forget_run(Path(trained.run))


def _folder(api: ApiContext) -> str:
    return str(api.config.data_dir.absolute())


def _keep_policy(api: ApiContext, trained: Trained, *, unchecked: bool = False) -> None:
    changed(
        api,
        store_policy,
        trained.checkpoint,
        policy=trained.policy,
        device_class=trained.device_class,
        provenance=trained.provenance,
        curves=trained.curves,
        trained_at_us=api.clock.wall_us(),
        verdict=trained.verdict,
        unchecked=unchecked,
    )


# -- the process ------------------------------------------------------------------------------------------


Left = TypeVar("Left", Trained, Checked)


def _left(api: ApiContext, task: TrainingTask, job: Job, kind: type[Left]) -> Left:
    """What a process leaves; a job that is cancelled has a training end with its best so far.

    Raises:
        JobCancelled: it was cancelled before there was anything to keep.
        ApiRefused: the training or the check failed.
        UnavailableError: its process died.
    """
    job.progress("starting")
    child = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        job.when_cancelled(lambda: child.send_signal(signal.SIGINT))
        return _ended(child, task, job, kind)
    finally:
        job.when_cancelled(_nothing)
        _end(child)


def _nothing() -> None:
    """The process has gone."""


def _ended(child: "subprocess.Popen[bytes]", task: TrainingTask, job: Job, kind: type[Left]) -> Left:
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(msgspec.json.encode(task) + b"\n")
        child.stdin.flush()  # it stays open: its end is the planner's
    except BrokenPipeError:
        pass  # it died: told below
    for line in child.stdout:
        message = msgspec.json.decode(line, type=TrainingMessage)
        if isinstance(message, kind):
            return message
        if isinstance(message, TrainingFailed):
            if job.cancelled:
                raise JobCancelled
            raise ApiRefused(message.problem)
        assert isinstance(message, TrainingStep)
        _tell(job, message)
    job.check()
    raise UnavailableError(
        f"the process ended with code {child.wait(_END_S)}",
        remedy="see the planner's log (memory?), and ask again: a training goes on where it was",
    )


def _tell(job: Job, step: TrainingStep) -> None:
    job.progress(step.text, done=step.done, size=step.size, figures=step.figures)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Leave nothing behind: it ends by itself, or with its stdin."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    finally:
        child.stdout.close()
        try:
            child.stdin.close()
        except BrokenPipeError:
            pass
