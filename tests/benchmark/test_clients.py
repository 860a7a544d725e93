"""What clients send holds the pictures that it was made of."""

from __future__ import annotations

import base64
import json
from email import message_from_bytes
from pathlib import Path

import numpy as np

from odevit_serve import bundle
from odevit_serve.benchmark.clients import MANY, messages
from odevit_serve.benchmark.pictures import some_pictures
from odevit_serve.data import images

PICTURES = some_pictures(3, 16)


def test_one_picture_is_the_body_or_base64_in_json(tiny_bundle: Path) -> None:
    assert messages("continuous", tiny_bundle, PICTURES).bodies == PICTURES
    asked = messages("litserve", tiny_bundle, PICTURES)
    assert [base64.b64decode(json.loads(body)["image"]) for body in asked.bodies] == PICTURES


def test_a_form_holds_many_of_the_pictures(tiny_bundle: Path) -> None:
    asked = messages("many", tiny_bundle, PICTURES)
    form = message_from_bytes(f"Content-Type: {asked.kind}\r\n\r\n".encode() + asked.bodies[0])
    parts = [part.get_payload(decode=True) for part in form.walk() if not part.is_multipart()]
    assert len(parts) == asked.images == MANY
    assert set(parts) <= set(PICTURES)


def test_tensors_are_the_pixels_that_the_model_sees(tiny_bundle: Path) -> None:
    asked = messages("tensors", tiny_bundle, PICTURES)
    length = int(asked.headers.split(":")[1])
    (given,) = json.loads(asked.bodies[0][:length])["inputs"]
    values = np.frombuffer(asked.bodies[0][length:], np.float32).reshape(given["shape"])
    assert len(values) == asked.images == MANY
    preprocessing = bundle.read_config(tiny_bundle).preprocessing
    known = {images.prepare(images.open_picture(picture), preprocessing).tobytes() for picture in PICTURES}
    assert {value.tobytes() for value in values} <= known
