"""Inputs that are almost right: files with some bytes changed, JSON with some values changed."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

NUMBERS = (0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 4096, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
# Text that json.dumps cannot make: put in place of a marker of the same index.
RAW = ("9" * 5000, "[" * 3000, "1e999", "-1e999", "NaN", "Infinity", '{"a":' * 2000, "1" + "0" * 400, "-0", '"\\ud800"')


@st.composite
def mutated(draw: st.DrawFn, seeds: Sequence[bytes], most: int = 6) -> bytes:
    """One of the seeds after some edits; after none, too."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(("byte", "byte", "number", "insert", "delete", "repeat", "cut", "splice")))
        if kind == "byte":
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "number":
            size, order = draw(st.sampled_from((2, 4, 8))), draw(st.sampled_from(("little", "big")))
            value = draw(st.sampled_from(NUMBERS)) % 256**size
            data[at : at + size] = value.to_bytes(size, order)  # type: ignore[arg-type]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=16))
        elif kind == "delete":
            del data[at : at + draw(st.integers(1, 64))]
        elif kind == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 512))] * draw(st.integers(1, 4))
        elif kind == "cut":
            del data[at:]
        else:
            other = draw(st.sampled_from(seeds))
            data[at:] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


def junk() -> st.SearchStrategy[Any]:
    """Values of any type; `@n@` stands for RAW[n]."""
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.sampled_from([*NUMBERS, -1, 0.5, 1.5, 1e-30, 1e300]),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=12),
        st.sampled_from([f"@{number}@" for number in range(len(RAW))]),
    )
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    )


@st.composite
def changed_json(draw: st.DrawFn, seeds: Sequence[Any], most: int = 4) -> bytes:
    """JSON text of one of the seeds with some values replaced, removed or added, at any depth."""
    data = copy.deepcopy(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, most))):
        place, key = data, None
        while isinstance(place, dict | list) and place:
            inner = draw(st.sampled_from(sorted(place))) if isinstance(place, dict) else _index(draw, place)
            if key is not None and draw(st.integers(0, 3)) == 0:
                break
            parent, key = place, inner
            place = place[inner]
        if key is None:
            return dump(draw(junk()))
        kind = draw(st.sampled_from(("value", "value", "remove", "add")))
        if kind == "value":
            parent[key] = draw(junk())
        elif kind == "remove":
            del parent[key]
        elif isinstance(parent, dict):
            parent[draw(st.text(max_size=8))] = draw(junk())
        else:
            parent.insert(key, draw(junk()))
    return dump(data)


def _index(draw: st.DrawFn, values: list[Any]) -> int:
    return draw(st.integers(0, len(values) - 1))


def dump(data: Any) -> bytes:
    text = json.dumps(data)
    for number, raw in enumerate(RAW):
        text = text.replace(f'"@{number}@"', raw)
    return text.encode("utf-8", "surrogatepass")


def _encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def pictures() -> list[bytes]:
    """Small files of every format that is read, in the modes and forms that differ inside of the reader."""
    values = np.random.default_rng(0).integers(0, 256, (12, 10, 4), dtype=np.uint8)
    colour, clear = Image.fromarray(values[..., :3].copy()), Image.fromarray(values)
    grey, indexed = colour.convert("L"), colour.convert("P")
    deep = Image.fromarray(values[..., 0].astype(np.uint16) * 257)
    turned = Image.Exif()
    turned[0x0112] = 6
    frames: dict[str, Any] = {"save_all": True, "append_images": [colour, colour]}
    made = [_encoded(colour, kind) for kind in ("PNG", "BMP", "PPM", "TGA", "ICO", "GIF", "TIFF", "WEBP", "JPEG2000")]
    made += [_encoded(picture, "PNG") for picture in (clear, grey, indexed, deep, colour.convert("1"))]
    made += [_encoded(indexed, "PNG", transparency=3), _encoded(grey.convert("LA"), "PNG")]
    made += [_encoded(colour, "JPEG", exif=turned), _encoded(colour, "JPEG", progressive=True), _encoded(grey, "JPEG")]
    made += [_encoded(colour.convert("CMYK"), "JPEG"), _encoded(colour, "MPO", **frames)]
    made += [_encoded(indexed, "GIF", **frames), _encoded(clear, "WEBP", lossless=True), _encoded(clear, "WEBP")]
    made += [_encoded(colour, "TIFF", compression=kind) for kind in ("tiff_lzw", "tiff_deflate", "packbits", "jpeg")]
    made += [_encoded(colour, "TIFF", **frames), _encoded(deep, "TIFF"), _encoded(grey.convert("F"), "TIFF")]
    made += [_encoded(clear, "TGA", compression="tga_rle"), _encoded(colour, "DIB"), _encoded(clear, "ICO")]
    with contextlib.suppress(KeyError, OSError):  # a Pillow without it
        made.append(_encoded(colour, "AVIF"))
    qoi = b"qoif" + (4).to_bytes(4, "big") + (1).to_bytes(4, "big") + b"\x03\x00" + b"\xfe\x01\x02\x03\xc2" + b"\0" * 8
    return [*made, qoi + b"\x01"]
