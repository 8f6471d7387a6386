"""Models: versions of a name, and their artifacts' files beside the database, named by their digests.

An artifact file appears under its name only when it is complete and synced, so its size may be trusted; its
bytes are checked against the digest when it comes in.
"""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.orm import Session

from stageloom.planner.schema.model import ModelDetail, ModelInfo
from stageloom.planner.store.database import now_us
from stageloom.planner.store.rollout_needs import rollout_that_needs
from stageloom.planner.store.rows import message_of
from stageloom.planner.store.tables import (
    ArtifactRow,
    DesiredRow,
    DeviceRow,
    ModelRow,
    ModelVersionRow,
    PlanRow,
    ProfileRow,
    ReportedRow,
    StageProfileRow,
)
from stageloom.shared.artifact import file_digest
from stageloom.shared.durable_file import sync_directory
from stageloom.shared.errors import DecodeError, InputError, NotFoundError, StorageError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.model_version import MOST_VERSIONS, ModelReference, model_reference
from stageloom.shared.plan import Plan, decode_plan


class Blobs:
    """A directory `ab/abcdef...` of files by digest."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, digest: Digest) -> Path:
        """Where the blob lies, or would lie."""
        return self.root / digest[:2] / digest

    def has(self, digest: Digest) -> bool:
        """Whether the blob is here, complete."""
        return self.path(digest).is_file()

    def put_file(self, source: Path, digest: Digest) -> int:
        """Copy a file in and return its size in bytes; a blob that is here already is left alone.

        Raises:
            DecodeError: the bytes copied do not have the digest.
            StorageError: the source cannot be read or the disk is full.
        """
        target = self.path(digest)
        if not target.is_file():
            with _os_errors(target.parent):
                target.parent.mkdir(parents=True, exist_ok=True)
                handle, name = tempfile.mkstemp(dir=target.parent, prefix=".incoming-")
                incoming = Path(name)
                try:
                    with os.fdopen(handle, "wb") as out, source.open("rb") as read:
                        shutil.copyfileobj(read, out, 1 << 20)
                        out.flush()
                        os.fsync(out.fileno())
                    # The copy is digested, not the source: the source may change while it is read.
                    if file_digest(incoming) != digest:
                        raise DecodeError(
                            f"{source} does not have the digest {digest[:12]}",
                            remedy="import the model again",
                        )
                    incoming.replace(target)
                    sync_directory(target.parent)
                finally:
                    incoming.unlink(missing_ok=True)
        return target.stat().st_size

    def put_bytes(self, data: bytes, digest: Digest) -> int:
        """`put_file` for a blob that is at hand.

        Raises:
            DecodeError, StorageError: as `put_file`.
        """
        with _os_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.root, prefix=".incoming-") as source:
                source.write(data)
                source.flush()
                return self.put_file(Path(source.name), digest)

    def remove(self, digest: Digest) -> None:
        """Delete a blob; absent is fine."""
        self.path(digest).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Delete what an interrupted `put_file` left; returns the number of files."""
        left = [*self.root.glob(".incoming-*"), *self.root.glob("*/.incoming-*")]
        for path in left:
            path.unlink(missing_ok=True)
        return len(left)


@contextmanager
def _os_errors(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{error.filename or where}: {error.strerror}",
            remedy="free space or fix the permissions of the data directory",
        ) from error


def name_artifact(
    session: Session, name: str, digest: Digest, graph: Graph, size_bytes: int
) -> tuple[ModelInfo, bool]:
    """Make an artifact the next version of a model; an artifact that is one of its versions stays that one.

    Returns the version, and whether it was made now.

    Raises:
        InputError: the model has had as many versions as may be.
    """
    row = session.get(ModelRow, name, with_for_update=True)
    if row is None:
        row = ModelRow(name=name, versions_made=0)
        session.add(row)
        session.flush()
    if session.get(ArtifactRow, digest) is None:
        session.add(
            ArtifactRow(
                digest=digest,
                size_bytes=size_bytes,
                operators=len(graph.operators),
                base_cuts=len(graph.base_cuts),
                opaque=sum(1 for operator in graph.operators if operator.opaque),
                added_at_us=now_us(session),
            )
        )
        session.flush()
    known = session.scalar(
        select(ModelVersionRow.number).where(ModelVersionRow.model == name, ModelVersionRow.digest == digest)
    )
    if known is None:
        if row.versions_made >= MOST_VERSIONS:
            raise InputError(f"model {name!r} has had {MOST_VERSIONS} versions", remedy="use another name")
        row.versions_made += 1
        session.add(
            ModelVersionRow(model=name, number=row.versions_made, digest=digest, added_at_us=now_us(session))
        )
        session.flush()
    (info,) = named_models(session, [str(ModelReference(name, known or row.versions_made))])
    return info, known is None


def forget_versions(session: Session, text: str, *, force: bool = False) -> list[Digest]:
    """Forget `NAME@VERSION`, or all versions of `NAME`; returns the artifacts whose files nothing else needs.

    What uses a version keeps it: a device that should run it or does, a measurement that was asked for and a
    kept plan that would lose it. `force` overrides all of them but rollouts, which end first.

    Raises:
        InputError: there is no such model, or something uses it.
    """
    name, version = model_reference(text)
    infos = [info for info in _of(session, name) if version in (None, info.version)]
    if not infos:
        raise _unknown(session, name, version)
    artifacts = {info.digest for info in infos}
    plans = _plans_with(session, artifacts)
    if rollout := rollout_that_needs(session, artifacts, plans.keys()):
        raise InputError(
            f"rollout {rollout!r} brings model {text!r} to devices, or may give it back to them",
            remedy=f"wait for it, or `stageloom rollout abort {rollout}`",
        )
    numbers = [info.version for info in infos]
    here = (ModelVersionRow.model == name) & ModelVersionRow.number.in_(numbers)
    gone = artifacts - set(session.scalars(select(ModelVersionRow.digest).where(~here)))
    if not force:
        _refuse_if_used(session, text, plans, _plans_with(session, gone), gone)
    session.execute(delete(ModelVersionRow).where(here))
    return sorted(gone)


def _refuse_if_used(
    session: Session,
    text: str,
    plans: Mapping[str, Digest],
    losing: Mapping[str, Digest],
    gone: Collection[Digest],
) -> None:
    """Refuse to forget what something uses.

    Args:
        session: Of the store.
        text: What the operator calls it.
        plans: Those that hold one of its artifacts; devices with one of them keep it.
        losing: Those that could no longer be pushed.
        gone: The artifacts that no other version is.

    Raises:
        InputError: which names one user of the first kind there is.
    """
    for wanted, said in ((True, "is part of what {} should run"), (False, "is part of what {} runs")):
        if users := _devices_of(session, plans, desired=wanted):
            raise InputError(
                f"model {text!r} {said.format(_some(users))}",
                remedy="push a plan without it there first, or revoke the device; "
                "--force forgets it all the same",
            )
    if asked := _asked_to_measure(session, losing, gone):
        raise InputError(
            f"model {text!r} is to be measured on {_some(asked)}, which has not answered",
            remedy="wait for the device, or revoke it; --force forgets the model all the same",
        )
    if losing:
        raise InputError(
            f"model {text!r} is in plan {_some(sorted(losing))}, which could no longer be pushed",
            remedy="--force forgets it all the same; adding the same file again brings it back",
        )


def _asked_to_measure(
    session: Session, plans: Mapping[str, Digest], artifacts: Collection[Digest]
) -> list[DeviceId]:
    """The devices that were asked to measure one of the artifacts or plans and have not answered."""
    models = select(ProfileRow.device).where(
        ProfileRow.artifact.in_(list(artifacts)), ProfileRow.answered_at_us.is_(None)
    )
    stages = select(StageProfileRow.device).where(
        StageProfileRow.plan.in_(list(plans)), StageProfileRow.answered_at_us.is_(None)
    )
    return _in_use(session, DeviceRow.name.in_(models) | DeviceRow.name.in_(stages))


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def model_detail(session: Session, text: str) -> ModelDetail:
    """A version, or the newest of a name, with the plans and devices that have it.

    Raises:
        InputError: there is none.
    """
    (info,) = named_models(session, [text])
    plans = _plans_with(session, {info.digest})
    return ModelDetail(
        info=info,
        plans=tuple(sorted(plans)),
        desired_on=tuple(_devices_of(session, plans, desired=True)),
        running_on=tuple(_devices_of(session, plans, desired=False)),
    )


def _plans_with(session: Session, artifacts: set[Digest]) -> dict[str, Digest]:
    """Digests of the plans that hold one of them, by name."""
    return {
        name: Digest(digest)
        for name, digest, wire in session.execute(select(PlanRow.name, PlanRow.digest, PlanRow.wire))
        if any(model.artifact in artifacts for model in decode_plan(wire).models)
    }


def _devices_of(session: Session, plans: Mapping[str, Digest], *, desired: bool) -> list[DeviceId]:
    """The devices that should run one of the plans, or that said last that they do; revoked ones never."""
    if desired:
        users = select(DesiredRow.device).where(DesiredRow.plan.in_(list(plans)))
    else:
        users = select(ReportedRow.device).where(ReportedRow.active.in_(sorted(set(plans.values()))))
    return _in_use(session, DeviceRow.name.in_(users))


def _in_use(session: Session, condition: ColumnElement[bool]) -> list[DeviceId]:
    """The devices of which it holds, by name; revoked ones never."""
    here = select(DeviceRow.name).where(DeviceRow.revoked.is_(False), condition).order_by(DeviceRow.name)
    return [DeviceId(name) for name in session.scalars(here)]


def named_models(session: Session, names: Sequence[str]) -> list[ModelInfo]:
    """The versions that `NAME` (its newest) or `NAME@VERSION` name, in the order asked.

    Raises:
        InputError: one of them does not exist.
    """
    asked = [model_reference(name) for name in names]
    found = {
        key: info
        for info in model_infos(session, names=sorted({name for name, _ in asked}), limit=None)
        for key in [ModelReference(info.model, info.version), *([ModelReference(info.model)] * info.newest)]
    }
    for name, version in asked:
        if (name, version) not in found:
            raise _unknown(session, name, version)
    return [found[one] for one in asked]


def _unknown(session: Session, name: str, version: int | None) -> InputError:
    here = [str(info.version) for info in _of(session, name)]
    if version is None or not here:
        return NotFoundError(f"there is no model {name!r}", remedy="see `stageloom model list`")
    said = f"model {name!r} has no version {version}, only {', '.join(here[-8:])}"
    return NotFoundError(said, remedy="see `stageloom model list`")


def _of(session: Session, name: str) -> list[ModelInfo]:
    return model_infos(session, names=[name], limit=None)


def model_infos(
    session: Session, *, names: list[str] | None = None, after: str = "", limit: int | None = 256
) -> list[ModelInfo]:
    """Versions by model and number, those after `NAME` or `NAME@VERSION`; no `limit`: all of them."""
    name, version = model_reference(after)
    behind = ModelVersionRow.model > name
    if version is not None:
        behind |= (ModelVersionRow.model == name) & (ModelVersionRow.number > version)
    newest = (
        select(ModelVersionRow.model, func.max(ModelVersionRow.number).label("number"))
        .group_by(ModelVersionRow.model)
        .subquery()
    )
    wanted = (
        select(ModelVersionRow, ArtifactRow, newest.c.number)
        .join(ArtifactRow, ArtifactRow.digest == ModelVersionRow.digest)
        .join(newest, newest.c.model == ModelVersionRow.model)
        .where(behind)
        .order_by(ModelVersionRow.model, ModelVersionRow.number)
        .limit(limit)
    )
    if names is not None:
        wanted = wanted.where(ModelVersionRow.model.in_(names))
    return [
        message_of(
            ModelInfo,
            artifact,
            model=row.model,
            version=row.number,
            newest=row.number == last,
            added_at_us=row.added_at_us,
        )
        for row, artifact, last in session.execute(wanted)
    ]


def newest_models(session: Session, limit: int) -> list[str]:
    """Names of models, of which a plan takes the newest versions."""
    wanted = select(ModelVersionRow.model).distinct().order_by(ModelVersionRow.model).limit(limit)
    return list(session.scalars(wanted))


def model_references(session: Session) -> dict[Digest, str]:
    """For each artifact what names it: `NAME` where it is the newest version, else `NAME@VERSION`."""
    return {
        info.digest: str(ModelReference(info.model, None if info.newest else info.version))
        for info in model_infos(session, limit=None)
    }


def plan_references(session: Session, plan: Plan) -> dict[str, str]:
    """For each model of a plan what names the version that it has: `NAME` where it is the newest.

    Raises:
        InputError: one was removed.
    """
    artifacts = {model.name: model.artifact for model in plan.models}
    found = {
        info.model: str(ModelReference(info.model, None if info.newest else info.version))
        for info in model_infos(session, names=sorted(artifacts), limit=None)
        if info.digest == artifacts[info.model]
    }
    if gone := [name for name in artifacts if name not in found]:
        raise InputError(
            f"the version of {gone[0]} that plan {plan.digest[:12]} has was removed", remedy="add it again"
        )
    return {name: found[name] for name in artifacts}
