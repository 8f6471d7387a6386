"""The files that the cases name: models that are broken or hostile, settings that cannot be read."""

import os
import sqlite3
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from stageloom.edge_agent.config import SETTINGS_NAME
from stageloom.planner.store.store import Store
from stageloom.planner.store.used_database import DATABASE_FILE
from stageloom.shared.importer.process import ImportLimits
from tests.importer.models import (
    allocating_2_gib,
    chained_functions,
    info,
    model_of,
    varying_loop,
    write_external,
)

MAX_NODES = ImportLimits().nodes
OVERSIZED_BYTES = 3 << 30  # more than a protobuf can hold

PLAN_FILES = {
    "no_thread": "intra_op_threads = 0\n",
    "unknown_field": 'colour = "red"\n',
    "unknown_queue": '[[models]]\nmodel = "a"\nqueue = "lifo"\n',
    "unknown_choice": 'step_choice = "fair"\n',
    "wait": 'wait = "timeout"\n',
    "timeout": "wait_timeout_s = 0.1\n",
    "overlapping": "lanes = 2\nlane_resources = [0, 1]\nresources = [{ cores = [0, 1] }, { cores = [1] }]\n",
    "crowded": "lanes = 2\nintra_op_threads = 2\nlane_resources = [0, 0]\n"
    "resources = [{ cores = [0, 1, 2] }]\n",
    "no_resource": "lane_resources = [1]\nresources = [{ cores = [0] }]\n",
    "placed_nowhere": 'placement = "dm"\n',
    "placed": "lanes = 2\nlane_resources = [0, 1]\nresources = [{ cores = [0] }, { cores = [1] }]\n"
    'placement = "nearest"\n',
    "no_lane": '[[models]]\nmodel = "fine"\nresources = [[0]]\n',
    "no_executor": '[[models]]\nmodel = "fine"\nexecutors = [1]\n',
    "elsewhere": "lane_resources = [0]\nresources = [{ cores = [9] }]\n",
    "other_executor": '[[further_executors]]\nname = "torch_cuda"\n',
}
"""For `plan create --from`."""


def write_files(folder: Path) -> None:
    """Everything below `folder`; nothing that runs."""
    _write_models(folder)
    for name, model in unsupported_models().items():
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
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


def unsupported_models() -> dict[str, onnx.ModelProto]:
    """Files that onnxruntime runs and slots cannot hold, or that it does not run, by name."""
    x, y = info("x", [4]), info("y", None)
    string, whole, half = TensorProto.STRING, TensorProto.INT64, TensorProto.BFLOAT16
    node = helper.make_node
    sparse = relu([1, 4])
    sparse.graph.sparse_initializer.add()
    chain = [node("Sin", [f"d{i - 1}" if i else "x"], [f"d{i}"]) for i in range(MAX_NODES + 1)]
    filled = [node("ConstantOfShape", ["s"], [f"c{i}"]) for i in range(9)]
    filled.append(node("Sum", ["x", *(f"c{i}" for i in range(9))], ["y"]))
    two_inputs = [info("ids", ["b", "s"]), info("fixed", [1]), info("images", [None, 3, "h", "w"])]
    return {
        "open_inputs": model_of([node("Relu", ["ids"], ["y"])], two_inputs, [y]),
        "string_input": model_of(
            [node("Identity", ["x"], ["y"])], [info("x", [1], string)], [info("y", [1], string)]
        ),
        "bfloat16_input": model_of(
            [node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)], [info("x", [1], half)], [y]
        ),
        "sequence_output": model_of(
            [node("SequenceConstruct", ["x"], ["y"])],
            [x],
            [helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)],
        ),
        "string_output": model_of([node("Cast", ["x"], ["y"], to=string)], [x], [info("y", [4], string)]),
        "sized_output": model_of([node("NonZero", ["x"], ["y"])], [x], [info("y", [1, "n"], whole)]),
        "varying_output": varying_loop(),
        "nothing": model_of([], [x], [x]),
        "unknown_operator": model_of(
            [node("Magic", ["x"], ["y"], domain="acme")], [x], [y], extra_domains=["acme"]
        ),
        "sparse": sparse,
        "two_makers": model_of([node("Relu", ["x"], ["y"]), node("Exp", ["x"], ["y"])], [x], [y]),
        "many_nodes": model_of(chain, [x], [info(f"d{MAX_NODES}", [4])]),
        "constants": model_of(filled, [info("x", [1])], [y], {"s": np.array([1 << 26])}),
        "borders": model_of([node("Relu", ["x"], ["y"])], [x], [y], metadata="{"),
    }


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
    (folder / "two_lines.token").write_text(f"stl_{'A' * 43}\nfor the office\n")
    for name, text in PLAN_FILES.items():
        (folder / f"{name}.toml").write_text(text)
    for name, text in {
        "not_toml": "[agent",
        "no_table": "replicas = 3\n",
        "wrong_type": '[agent]\nreplicas = "many"\n',
        "unknown_key": "[agent]\nreplica = 3\n",
        "no_regime": "[agent]\nalarm_regime = 1.0\n",
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
