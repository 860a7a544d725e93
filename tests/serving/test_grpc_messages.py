"""The messages of the Open Inference Protocol: as its clients have them, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("google.protobuf", reason="needs the extra `grpc`")

from odevit_serve.serving.grpc_messages import MESSAGES, SERVICE, TYPES

service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2", reason="needs the extra `triton`")


def theirs(name: str) -> Any:
    """The client's own class of a message."""
    found: Any = service_pb2
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", MESSAGES)
def test_the_messages_are_those_of_the_protocol(name: str) -> None:
    """Field by field against the client's generated code: names, numbers, types, maps and choices."""

    def fields(message: Any) -> dict[str, Any]:
        return {
            f.name: (
                f.number,
                f.type,
                f.is_repeated,
                f.message_type.full_name if f.message_type else None,
                bool(f.message_type and f.message_type.GetOptions().map_entry),
                f.containing_oneof.name if f.containing_oneof else None,
            )
            for f in message.fields
        }

    own, other = TYPES[name].DESCRIPTOR, theirs(name).DESCRIPTOR
    assert own.full_name == other.full_name
    assert fields(own) == fields(other)


def test_every_method_that_is_served_has_its_two_messages() -> None:
    service = service_pb2.DESCRIPTOR.services_by_name[SERVICE.rpartition(".")[2]]
    methods = {method.name: method for method in service.methods}
    asked = {name.removesuffix("Request") for name in MESSAGES if name.endswith("Request")}
    assert {"ServerLive", "ModelInfer", "RepositoryModelLoad"} <= asked <= set(methods)
    for name in asked:
        assert methods[name].input_type.full_name == TYPES[f"{name}Request"].DESCRIPTOR.full_name
        assert methods[name].output_type.full_name == TYPES[f"{name}Response"].DESCRIPTOR.full_name


def test_what_one_side_writes_the_other_reads() -> None:
    request = TYPES["ModelInferRequest"](model_name="Größe", id="7", raw_input_contents=[b"\x00\x01", b""])
    request.inputs.add(name="image", datatype="BYTES", shape=[1, -1])
    request.outputs.add(name="label")
    request.parameters["max_steps"].int64_param = 0  # a choice that was made, though of the default value
    request.parameters["adaptive"].bool_param = False
    read = theirs("ModelInferRequest").FromString(request.SerializeToString())
    assert (read.model_name, read.id, list(read.raw_input_contents)) == ("Größe", "7", [b"\x00\x01", b""])
    assert list(read.inputs[0].shape) == [1, -1]
    assert {key: value.WhichOneof("parameter_choice") for key, value in read.parameters.items()} == {
        "max_steps": "int64_param", "adaptive": "bool_param",
    }  # fmt: skip
    again = TYPES["ModelInferRequest"].FromString(read.SerializeToString())
    assert again == request


def test_of_several_kinds_of_parameter_there_is_one() -> None:
    own = TYPES["InferParameter"](int64_param=3)
    own.string_param = "x"
    assert own.WhichOneof("parameter_choice") == "string_param"
    assert own.int64_param == 0


def test_they_can_stand_beside_the_clients_own_code() -> None:
    """The same names twice in one process: each in a pool of its own."""
    assert TYPES["ModelInferRequest"].DESCRIPTOR.file.pool is not theirs("ModelInferRequest").DESCRIPTOR.file.pool
    assert TYPES["ModelReadyRequest"](name="a").SerializeToString() == b"\n\x01a"
