"""`stageloom backup`: a consistent copy of the planner's data, while it runs or not."""

from pathlib import Path
from typing import Annotated

import typer

from stageloom.planner.cli.options import DatabaseUrl, DataDir, Json, data_dir_of
from stageloom.planner.cli.output import emit_json, progress


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A tar file to make.")],
    data_dir: DataDir = None,
    database_url: DatabaseUrl = "",
    json: Json = False,
) -> None:
    """Copy database, artifacts and keys into one tar file. It is of one moment; the planner may run.

    It holds the planner's secret key: keep it as safe as the data directory. To restore, unpack it into an
    empty directory and start a planner there. For a database on a server use pg_dump.

    \b
    stageloom backup /backup/stageloom-$(date +%F).tar
    mkdir new && tar -xf FILE -C new && stageloom up --data-dir new
    """
    from stageloom.planner.service import KEY_FILE
    from stageloom.planner.store.backup import backup as make_backup

    size_bytes = make_backup(data_dir_of(data_dir), database_url, file, (KEY_FILE,))
    if json:
        emit_json({"file": str(file), "size_bytes": size_bytes})
    progress(f"{file}: {size_bytes / 1e6:.1f} MB")
