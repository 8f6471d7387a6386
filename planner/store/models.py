"""Models: names for artifacts, and the artifact files beside the database, named by their digests.

An artifact file appears under its name only when it is complete and synced, so its size may be trusted; its
bytes are checked against the digest when it comes in.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from stageloom.planner.schema.model import ModelInfo
from stageloom.planner.store.database import now_us
from stageloom.planner.store.rows import message_of
from stageloom.planner.store.tables import ArtifactRow, DesiredRow, ModelRow, PlanRow
from stageloom.shared.artifact import file_digest
from stageloom.shared.durable_file import sync_directory
from stageloom.shared.errors import DecodeError, InputError, NotFoundError, StorageError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import decode_plan


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


def name_artifact(session: Session, name: str, digest: Digest, graph: Graph, size_bytes: int) -> ModelInfo:
    """Give an artifact a name; a repeat with the same artifact changes nothing.

    Raises:
        InputError: the name belongs to another artifact.
    """
    row = session.get(ModelRow, name)
    if row is not None and row.digest != digest:
        raise InputError(
            f"model {name!r} is artifact {row.digest[:12]}",
            remedy=f"choose another name, or run `stageloom model remove {name}` first",
        )
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
    if row is None:
        session.add(ModelRow(name=name, digest=digest, added_at_us=now_us(session)))
        session.flush()
    return named_models(session, [name])[0]


def forget_name(session: Session, name: str) -> Digest | None:
    """Forget a name; returns the artifact's digest if nothing else needs its file.

    Raises:
        InputError: there is no such model, or a device's desired plan runs it.
    """
    info = named_models(session, [name])[0]
    users = [
        device
        for device, wire in session.execute(
            select(DesiredRow.device, PlanRow.wire).join(PlanRow, PlanRow.name == DesiredRow.plan)
        )
        if any(model.artifact == info.digest for model in decode_plan(wire).models)
    ]
    if users:
        raise InputError(
            f"model {name!r} is part of what {users[0]} should run",
            remedy="push a plan without it there first, or revoke the device",
        )
    session.execute(delete(ModelRow).where(ModelRow.name == name))
    shared = session.scalar(select(func.count()).select_from(ModelRow).where(ModelRow.digest == info.digest))
    return None if shared else info.digest


def named_models(session: Session, names: list[str]) -> list[ModelInfo]:
    """The named models, in the order asked.

    Raises:
        InputError: one of them does not exist.
    """
    found = {info.model: info for info in model_infos(session, names=names, limit=len(names))}
    for name in names:
        if name not in found:
            raise NotFoundError(f"there is no model {name!r}", remedy="see `stageloom model list`")
    return [found[name] for name in names]


def model_infos(
    session: Session, *, names: list[str] | None = None, after: str = "", limit: int = 256
) -> list[ModelInfo]:
    """Models by name."""
    wanted = (
        select(ModelRow, ArtifactRow)
        .join(ArtifactRow, ArtifactRow.digest == ModelRow.digest)
        .where(ModelRow.name > after)
        .order_by(ModelRow.name)
        .limit(limit)
    )
    if names is not None:
        wanted = wanted.where(ModelRow.name.in_(names))
    return [
        message_of(ModelInfo, artifact, model=model.name, added_at_us=model.added_at_us)
        for model, artifact in session.execute(wanted)
    ]
