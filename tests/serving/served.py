"""Models to serve, and tritonclient over either transport as one thing."""

import contextlib
import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import tritonclient.grpc
import tritonclient.http
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.protobuf.json_format import MessageToDict
from onnx import TensorProto, helper

from stageloom.edge_agent.config import ModelFile
from stageloom.edge_agent.serving.datatypes import PROTOCOL_NAMES
from stageloom.edge_agent.serving.settings import ServingSettings
from tests.agent.models import ROW_SHAPE, write_tiny
from tests.agent.process import AgentProcess

KINDS = [name for name in PROTOCOL_NAMES if name != "bfloat16"]  # of which onnxruntime joins none on a CPU
KIND_SHAPE = (2, 3)


def write_kinds(path: Path) -> Path:
    """A tensor of every type, `x_TYPE` to `y_TYPE`, which is twice itself along axis 0: no batch of rows."""
    types = {name: helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in KINDS}
    graph = helper.make_graph(
        [helper.make_node("Concat", [f"x_{name}"] * 2, [f"y_{name}"], axis=0) for name in types],
        "kinds",
        [helper.make_tensor_value_info(f"x_{name}", kind, KIND_SHAPE) for name, kind in types.items()],
        [helper.make_tensor_value_info(f"y_{name}", kind, (4, 3)) for name, kind in types.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def write_divider(path: Path) -> Path:
    """1 / x: NaN and infinity where a test wants them."""
    one = helper.make_node("Reciprocal", ["x"], ["y"])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 2)) for name in ("x", "y")]
    graph = helper.make_graph([one], "divider", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that vouches for itself, and its key, in PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stageloom test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(Encoding.PEM))
    files[1].touch(0o600)
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


@contextlib.contextmanager
def serving_agent(directory: Path, **settings: Any) -> Iterator[AgentProcess]:
    """An agent that serves tiny, kinds and divider over both transports, on ports of its own choice."""
    files = {
        "tiny": write_tiny(directory / "tiny.onnx"),
        "kinds": write_kinds(directory / "kinds.onnx"),
        "divider": write_divider(directory / "divider.onnx"),
    }
    versions = {"divider": 3}
    models = tuple(
        ModelFile(path=str(file), name=name, version=versions.get(name, 1)) for name, file in files.items()
    )
    serving = ServingSettings(**({"http": "127.0.0.1:0", "grpc": "127.0.0.1:0"} | settings))
    with AgentProcess(directory / "home", models=models, executor="onnx", serving=serving) as agent:
        agent.until(
            lambda status: status.ready and status.serving and (status.serving.http or status.serving.grpc),
            "HTTP and gRPC are served",
        )
        yield agent


class Triton:
    """tritonclient, unmodified; what it gives over gRPC as messages comes in JSON's form here, too."""

    def __init__(self, kind: str, address: str) -> None:
        self.kind = kind
        self.address = address
        self.module: ModuleType = {"http": tritonclient.http, "grpc": tritonclient.grpc}[kind]
        self.client: Any = self.module.InferenceServerClient(address)

    def close(self) -> None:
        self.client.close()

    def json(self, value: Any) -> Any:
        """A message over gRPC in JSON's form; over HTTP the value is in that already."""
        if hasattr(value, "DESCRIPTOR"):
            return MessageToDict(value, preserving_proto_field_name=True)
        return value

    def input(self, name: str, array: Any, datatype: str = "FP32", **options: Any) -> Any:
        """An input with its data."""
        made = self.module.InferInput(name, list(array.shape), datatype)
        made.set_data_from_numpy(array, **options)
        return made

    def infer(self, array: Any, **options: Any) -> Any:
        """The result of `tiny`."""
        return self.client.infer("tiny", [self.input("input", array)], **options)


def rows(count: int, seed: int = 0) -> Any:
    """An input of `tiny`."""
    shape = (count, *ROW_SHAPE[1:])
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
