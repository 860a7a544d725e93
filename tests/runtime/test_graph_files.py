"""ONNX files and what they say of themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import onnx
import pytest

from odevit_serve import bundle
from odevit_serve.errors import UserError
from odevit_serve.runtime.graph_files import digest, found_digest, properties, read, write_metadata


@pytest.fixture
def stem(tiny_bundle: Path) -> onnx.ModelProto:
    return read(tiny_bundle / bundle.STEM)


def test_metadata_changes_no_digest_and_weights_do(stem: onnx.ModelProto) -> None:
    before = digest(stem)
    stem.metadata_props.add(key="more", value="words")
    assert digest(stem) == before
    stem.graph.initializer[0].name += "x"
    assert digest(stem) != before


def test_the_config_comes_back_and_keys_of_others_stay(stem: onnx.ModelProto, tiny_bundle: Path) -> None:
    config = bundle.read_config(tiny_bundle)
    stem.metadata_props.add(key="theirs", value="1")
    write_metadata(stem, config, opset=20)
    found = properties(stem)
    assert found["theirs"] == "1"
    assert found["opset"] == "20"
    assert found[bundle.METADATA_KEY] == config.to_json()
    assert ast.literal_eval(found["names"]) == dict(enumerate(config.labels))
    assert found_digest(stem) == found["graph"] == digest(stem)


def test_a_file_without_a_digest_has_that_of_its_graph(stem: onnx.ModelProto) -> None:
    del stem.metadata_props[:]
    assert found_digest(stem) == digest(stem)


@pytest.mark.parametrize(
    ("content", "told"), [(b"", "is empty"), (b"\xff" * 40, "is not a readable ONNX file"), (None, "has no stem.onnx")]
)
def test_what_cannot_be_read(tmp_path: Path, content: bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / bundle.STEM).write_bytes(content)
    with pytest.raises(UserError, match=told):
        read(tmp_path / bundle.STEM)
