"""The rival by LitServe gives the same answers: what it is compared by is speed alone."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("litserve", reason="needs litserve")

import httpx

import odevit_serve
from odevit_serve.benchmark.clients import messages
from odevit_serve.benchmark.litserve import Classify
from odevit_serve.benchmark.pictures import some_pictures
from odevit_serve.benchmark.servers import process

PICTURES = some_pictures(5, 16)


@pytest.fixture(scope="module")
def api(tiny_files: dict[str, Path]) -> Classify:
    own = Classify(str(tiny_files["onnx"]), 1, max_batch_size=4, batch_timeout=0.005)
    own.setup("cpu")
    return own


def test_a_batch_gets_the_answers_of_the_file_itself(api: Classify, tiny_files: dict[str, Path]) -> None:
    requests = [{"image": base64.b64encode(picture).decode()} for picture in PICTURES]
    x = api.batch([api.decode_request(request) for request in requests])
    found = [api.encode_response(output) for output in api.unbatch(api.predict(x))]
    wanted = odevit_serve.load(tiny_files["onnx"], threads=1).predict(PICTURES)
    assert [answer["label"] for answer in found] == [answer.label for answer in wanted]
    np.testing.assert_allclose(
        [answer["probability"] for answer in found], [answer.probability for answer in wanted], rtol=1e-5
    )
    assert len({answer["probability"] for answer in found}) == len(PICTURES)


def test_it_is_asked_as_its_clients_do(tiny_bundle: Path, tiny_files: dict[str, Path]) -> None:
    asked = messages("litserve", tiny_bundle, PICTURES)
    wanted = odevit_serve.load(tiny_files["onnx"], threads=1).predict(PICTURES[0])
    with process("litserve", tiny_bundle, tiny_files["onnx"], 1) as (address, _):
        answer = httpx.post(address + asked.path, content=asked.bodies[0], headers={"content-type": asked.kind})
    assert answer.json() == {"label": wanted.label, "probability": pytest.approx(wanted.probability, rel=1e-5)}
