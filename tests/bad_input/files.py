"""The files that the cases name: models that are broken or hostile, settings that cannot be read."""

import json
import os
import sqlite3
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from edge_agent.config import SETTINGS_NAME
from planner.store.reading import DATABASE_FILE
from planner.store.store import Store
from tests.importer.models import allocating_2_gib, chained_functions, info, model_of, write_external

OVERSIZED_BYTES = 3 << 30  # more than a protobuf can hold


def write_files(folder: Path) -> None:
    """Everything below `folder`; nothing that runs."""
    _write_models(folder)
    _write_external(folder)
    _write_settings(folder)
    _write_data_directories(folder)


def relu(shape: list[int | str]) -> onnx.ModelProto:
    """One operator, `x` to `y`."""
    return model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x", shape)], [info("y", shape)])


def _write_models(folder: Path) -> None:
    data = relu([1, 4]).SerializeToString()
    (folder / "fine.onnx").write_bytes(data)
    (folder / "truncated.onnx").write_bytes(data[:-3])
    (folder / "empty.onnx").write_bytes(b"")
    (folder / "text.onnx").write_text("this is no model")
    (folder / "open.onnx").write_bytes(relu(["n", 4]).SerializeToString())
    (folder / "allocates.onnx").write_bytes(allocating_2_gib())
    (folder / "functions.onnx").write_bytes(chained_functions(3000).SerializeToString())
    with (folder / "oversized.onnx").open("wb") as file:
        file.truncate(OVERSIZED_BYTES)  # sparse


def _write_external(folder: Path) -> None:
    secret = folder / "secret.bin"
    secret.write_bytes(np.arange(16, dtype=np.float32).tobytes())
    for name, location in {
        "by_path": "../secret.bin",
        "by_absolute_path": str(secret),
        "by_link": "w.bin",
        "by_hard_link": "w.bin",
    }.items():
        inside = folder / name
        inside.mkdir()
        write_external(inside, location)
        if name == "by_link":
            (inside / "w.bin").symlink_to(secret)
        elif name == "by_hard_link":
            os.link(secret, inside / "w.bin")


def _write_settings(folder: Path) -> None:
    (folder / "wrong_type.toml").write_text('[planner]\nbulk_credits = "many"\n')
    (folder / "unknown_key.toml").write_text("[planner]\nbulk_credit = 3\n")
    (folder / "not_toml.toml").write_text("[planner\n")
    for name, text in {
        "not_json": "{",
        "no_object": "[]",
        "wrong_type": json.dumps({"replicas": "many"}),
        "unknown_key": json.dumps({"replica": 3}),
    }.items():
        home = folder / f"agent_{name}"
        home.mkdir()
        (home / SETTINGS_NAME).write_text(text)


def _write_data_directories(folder: Path) -> None:
    (folder / "broken_database").mkdir()
    (folder / "broken_database" / DATABASE_FILE).write_bytes(b"no database, but long enough\n" * 100)
    (folder / "readable_key").mkdir()
    key = folder / "readable_key" / "planner.keys"
    key.write_text("x" * 40 + "\n" + "y" * 40 + "\n")
    key.chmod(0o644)
    (folder / "newer_schema").mkdir()
    Store(folder / "newer_schema").close()
    with sqlite3.connect(folder / "newer_schema" / DATABASE_FILE) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
