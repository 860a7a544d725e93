"""Bodies of the Open Inference Protocol: packing and parsing are inverse, and what does not fit is told."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odevit_serve.errors import UsageError
from odevit_serve.serving.http.open_inference import IMAGE, PIXELS, Tensor, packed, parse, tensor


def described(name: str, shape: list[int], **more: Any) -> Tensor:
    return Tensor(name=name, shape=shape, datatype="FP32" if name == PIXELS else "BYTES", **more)


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_pictures_come_back_as_they_were_packed(pictures: list[bytes]) -> None:
    blob = packed("BYTES", pictures)
    assert tensor(described(IMAGE, [len(pictures)], parameters={"binary_data_size": len(blob)}), blob) == pictures
    texts = [base64.b64encode(picture).decode() for picture in pictures]
    assert tensor(described(IMAGE, [len(pictures)], data=texts), b"") == pictures


@given(st.integers(1, 3), st.integers(1, 3))
def test_pixels_come_back_as_they_were_packed(count: int, side: int) -> None:
    pixels = np.random.default_rng(count).normal(size=(count, 3, side, side)).astype(np.float32)
    blob = packed("FP32", pixels)
    shape = list(pixels.shape)
    np.testing.assert_array_equal(
        tensor(described(PIXELS, shape, parameters={"binary_data_size": len(blob)}), blob), pixels
    )
    np.testing.assert_array_equal(tensor(described(PIXELS, shape, data=pixels.tolist()), b""), pixels)


def test_the_head_of_a_body_ends_where_its_header_says() -> None:
    head = json.dumps({"inputs": [{"name": IMAGE, "shape": [1], "datatype": "BYTES"}]}).encode()
    asked, rest = parse(head + b"tail", str(len(head)), 1000)
    assert (asked.inputs[0].name, rest) == (IMAGE, b"tail")
    assert parse(head, None, 1000)[1] == b""


@pytest.mark.parametrize("length", ["0", "99999", "-1", "1e1", "", "9" * 5000])
def test_a_header_that_is_no_length_within_the_body(length: str) -> None:
    with pytest.raises(UsageError, match="must be between 1 and the 2 bytes of the body"):
        parse(b"{}", length, 1000)


@pytest.mark.parametrize(
    ("given_", "blob", "told"),
    [
        (Tensor(name="x", shape=[1], datatype="FP32"), b"", "unknown input 'x'"),
        (Tensor(name=PIXELS, shape=[1], datatype="INT8"), b"", "must be of datatype FP32, not 'INT8'"),
        (described(PIXELS, [1]), b"", "neither data nor binary_data_size"),
        (described(PIXELS, [1], data=[1.0], parameters={"binary_data_size": 4}), b"1234", "both data and binary"),
        (described(PIXELS, [1], parameters={"binary_data_size": 8}), b"1234", "is not the 4 bytes that follow"),
        (described(PIXELS, [1], parameters={"binary_data_size": 3}), b"123", "no whole number of FP32 values"),
        (described(PIXELS, [2], data=[1.0]), b"", r"has 1 values, its shape \[2\] says 2"),
        (described(PIXELS, [1], data=["a"]), b"", "must be numbers"),
        (described(IMAGE, [1], data=["*"]), b"", "must be base64 text"),
        (described(IMAGE, [1], parameters={"binary_data_size": 3}), b"123", "ends inside a length"),
        (described(IMAGE, [1], parameters={"binary_data_size": 5}), b"\x09\0\0\0a", "of 9 bytes ends past the tensor"),
        (described(IMAGE, [0], parameters={"binary_data_size": 8}), bytes(8), r"has 1 values, its shape \[0\] says 0"),
    ],
)
def test_tensors_that_do_not_fit(given_: Tensor, blob: bytes, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        tensor(given_, blob)
