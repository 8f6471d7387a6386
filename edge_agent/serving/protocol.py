"""The messages of the protocol over gRPC, from `inference.protoset`, which is `inference.proto` compiled.

No Python is generated: generated modules register their messages in protobuf's one pool, where those of
tritonclient are, too, under the same names, so that no process could import both. These have a pool of their
own.
"""

from functools import cache
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE: Final = "inference"
SERVICE: Final = f"{PACKAGE}.GRPCInferenceService"
SOURCE: Final = Path(__file__).with_name("inference.proto")
COMPILED: Final = Path(__file__).with_name("inference.protoset")


@cache
def _pool() -> Any:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


@cache
def message(name: str) -> Any:
    """The class of a message of the package."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


def service() -> Any:
    """The service's descriptor."""
    return _pool().FindServiceByName(SERVICE)
