"""Our messages against those of tritonclient, and against the source that they are compiled from."""

from pathlib import Path
from typing import Any

from grpc_tools import protoc
from tritonclient.grpc import model_config_pb2, service_pb2

from stageloom.edge_agent.serving import protocol


def test_compiled_messages_are_those_of_the_source(tmp_path: Path) -> None:
    """python -m grpc_tools.protoc -I FOLDER --descriptor_set_out=inference.protoset inference.proto"""
    made = tmp_path / "made"
    folder = protocol.SOURCE.parent
    code = protoc.main(["protoc", f"-I{folder}", f"--descriptor_set_out={made}", str(protocol.SOURCE)])
    assert code == 0
    assert made.read_bytes() == protocol.COMPILED.read_bytes()


def _theirs(name: str) -> Any:
    found = service_pb2.DESCRIPTOR.message_types_by_name.get(name)
    return found or model_config_pb2.DESCRIPTOR.message_types_by_name[name]


def _same(ours: Any, theirs: Any) -> int:
    """Compare every field of ours, and of the messages inside; how many there were."""
    compared = 0
    for field in ours.fields:
        other = theirs.fields_by_name[field.name]
        assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated)
        compared += 1
    for nested in ours.nested_types:
        compared += _same(nested, theirs.nested_types_by_name[nested.name])
    return compared


def test_every_field_has_tritons_number_and_type() -> None:
    messages = protocol.service().file.message_types_by_name
    assert sum(_same(message, _theirs(name)) for name, message in messages.items()) > 100


def test_every_method_of_the_service_is_there() -> None:
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]

    def shape(service: Any) -> set[tuple[str, str, str]]:
        return {(one.name, one.input_type.full_name, one.output_type.full_name) for one in service.methods}

    assert shape(protocol.service()) == shape(theirs)
