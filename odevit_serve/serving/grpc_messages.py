"""The messages of the Open Inference Protocol over gRPC, as its published description numbers them.

They live in a pool of their own, so that a program may load this and a client's generated code side by side.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE, SERVICE = "inference", "inference.GRPCInferenceService"
_TENSOR = "name=1 datatype=2 shape=3*int64 parameters=4%InferParameter contents=5:InferTensorContents"
# A field is name=number, of type string unless told: *: repeated, ?: one of several, %: a map from text, :: a message.
MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live=1:bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready=1:bool",
    "ModelReadyRequest": "name=1 version=2",
    "ModelReadyResponse": "ready=1:bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name=1 version=2 extensions=3*string",
    "ModelMetadataRequest": "name=1 version=2",
    "ModelMetadataResponse.TensorMetadata": "name=1 datatype=2 shape=3*int64",
    "ModelMetadataResponse": "name=1 versions=2*string platform=3 inputs=4*ModelMetadataResponse.TensorMetadata "
    "outputs=5*ModelMetadataResponse.TensorMetadata",
    "InferParameter": "bool_param=1?bool int64_param=2?int64 string_param=3?string double_param=4?double "
    "uint64_param=5?uint64",
    "InferTensorContents": "bool_contents=1*bool int_contents=2*int32 int64_contents=3*int64 uint_contents=4*uint32 "
    "uint64_contents=5*uint64 fp32_contents=6*float fp64_contents=7*double bytes_contents=8*bytes",
    "ModelInferRequest.InferInputTensor": _TENSOR,
    "ModelInferRequest.InferRequestedOutputTensor": "name=1 parameters=2%InferParameter",
    "ModelInferRequest": "model_name=1 model_version=2 id=3 parameters=4%InferParameter "
    "inputs=5*ModelInferRequest.InferInputTensor outputs=6*ModelInferRequest.InferRequestedOutputTensor "
    "raw_input_contents=7*bytes",
    "ModelInferResponse.InferOutputTensor": _TENSOR,
    "ModelInferResponse": "model_name=1 model_version=2 id=3 parameters=4%InferParameter "
    "outputs=5*ModelInferResponse.InferOutputTensor raw_output_contents=6*bytes",
    "ModelRepositoryParameter": "bool_param=1?bool int64_param=2?int64 string_param=3?string bytes_param=4?bytes",
    "RepositoryIndexRequest": "repository_name=1 ready=2:bool",
    "RepositoryIndexResponse.ModelIndex": "name=1 version=2 state=3 reason=4",
    "RepositoryIndexResponse": "models=1*RepositoryIndexResponse.ModelIndex",
    "RepositoryModelLoadRequest": "repository_name=1 model_name=2 parameters=3%ModelRepositoryParameter",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "repository_name=1 model_name=2 parameters=3%ModelRepositoryParameter",
    "RepositoryModelUnloadResponse": "",
}
_WORD = re.compile(r"(\w+)=(\d+)([*?%:]?)([\w.]*)")
_Field = descriptor_pb2.FieldDescriptorProto
_KINDS = {
    "double": _Field.TYPE_DOUBLE, "float": _Field.TYPE_FLOAT, "int64": _Field.TYPE_INT64, "uint64": _Field.TYPE_UINT64,
    "int32": _Field.TYPE_INT32, "uint32": _Field.TYPE_UINT32, "bool": _Field.TYPE_BOOL, "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}  # fmt: skip


def _field(message: Any, name: str, number: int, kind: str, repeated: bool = False) -> Any:
    field = message.field.add(name=name, number=number)
    field.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
    if kind in _KINDS:
        field.type = _KINDS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    return field


def _describe(message: Any, full: str, text: str) -> None:
    for word in text.split():
        found = _WORD.fullmatch(word)
        assert found is not None, word
        name, number, mark, kind = found[1], int(found[2]), found[3], found[4] or "string"
        if mark == "%":
            entry = message.nested_type.add(name="ParametersEntry")
            entry.options.map_entry = True
            _field(entry, "key", 1, "string")
            _field(entry, "value", 2, kind)
            _field(message, name, number, f"{full}.ParametersEntry", repeated=True)
            continue
        field = _field(message, name, number, kind, repeated=mark == "*")
        if mark == "?":
            if not message.oneof_decl:
                message.oneof_decl.add(name="parameter_choice")
            field.oneof_index = 0


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="odevit_open_inference.proto", package=PACKAGE, syntax="proto3")
    outer: dict[str, Any] = {}
    for full in sorted(MESSAGES, key=lambda name: name.count(".")):
        parent, _, own = full.rpartition(".")
        holder = outer[parent].nested_type if parent else file.message_type
        outer[full] = holder.add(name=own)
        _describe(outer[full], full, MESSAGES[full])
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{PACKAGE}.{name}")) for name in MESSAGES}


TYPES: dict[str, Any] = _build()
