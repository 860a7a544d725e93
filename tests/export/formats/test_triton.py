"""The model repository, read by the schema that Triton publishes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_model

from odevit_serve.errors import UserError
from odevit_serve.export.formats import triton

BATCH = (1, 8, 64)


def parse(text: str) -> Any:
    model_config_pb2 = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="needs tritonclient[grpc]")
    from google.protobuf import text_format

    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_the_config_says_what_the_graph_is() -> None:
    config = parse(triton.config_text(tiny_model().config, "my model", BATCH, with_attention=True))
    assert (config.name, config.backend, config.max_batch_size) == ("my model", "onnxruntime", 64)
    (image,) = config.input
    assert (image.name, list(image.dims)) == ("pixel_values", [3, 16, 16])
    assert {o.name: list(o.dims) for o in config.output} == {"logits": [5], "cls_attention": [3, 16]}
    assert config.output[0].label_filename == "labels.txt"
    assert list(config.dynamic_batching.preferred_batch_size) == [8, 64]


def test_the_check_is_by_the_schema() -> None:
    pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]")
    text = triton.config_text(tiny_model().config, "m", BATCH)
    assert triton.check_config(text).found == "valid"
    with pytest.raises(UserError, match=r"Triton's schema refuses config.pbtxt.*max_batch_sise"):
        triton.check_config(text.replace("max_batch_size", "max_batch_sise"))


def test_labels_are_one_a_line(tmp_path: Path) -> None:
    triton.lay_out(tmp_path / "m", tiny_model().config, "m", BATCH, with_attention=False)
    assert (tmp_path / "m" / "labels.txt").read_text() == "ant\nbee\ncat\ndog\neel\n"
    parse((tmp_path / "m" / "config.pbtxt").read_text())
