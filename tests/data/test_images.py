"""Reading pictures of every kind, refusing what is none, and the transform against timm's."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from odevit_serve.config import Preprocessing
from odevit_serve.data import images
from odevit_serve.errors import UserError

RNG = np.random.default_rng(0)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise on gradients: every resampling mistake shows."""
    rng = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    base = np.stack([x, y, 1 - x], -1) * 160
    return Image.fromarray((base + rng.integers(0, 95, (height, width, 3))).astype(np.uint8))


def encode(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
def test_transform_equals_timm(interpolation: str, crop_mode: str) -> None:
    from timm.data import create_transform as create

    sizes = [
        (32, 32),
        (33, 32),
        (640, 480),
        (480, 641),
        (17, 300),
        (31, 9),
        (1, 50),
        (224, 224),
        (225, 223),
        (1000, 40),
    ]
    for side, crop_pct in ((32, 1.0), (224, 0.875), (48, 0.9), (16, 0.95)):
        own = Preprocessing(
            (3, side, side), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), interpolation, crop_pct, crop_mode
        )
        theirs = create(
            own.input_size,
            interpolation=interpolation,
            mean=own.mean,
            std=own.std,
            crop_pct=crop_pct,
            crop_mode=crop_mode,
        )
        for seed, size in enumerate(sizes):
            if crop_mode == "border" and min(size) * side < max(size):
                continue  # timm resizes such a strip to nothing and fails
            picture = noise(*size, seed)
            expected, got = theirs(picture).numpy(), images.prepare(picture, own)
            grey = np.abs(expected - got) * np.array(own.std)[:, None, None] * 255
            assert (got.shape, got.dtype) == ((3, side, side), np.float32)
            assert grey.max() <= 1.001, (size, side, crop_pct)


def test_transform_of_a_strip_stays_small() -> None:
    """timm would make 32 x 41 million pixels of this on its way; only what is kept may be computed."""
    strip = Image.new("RGB", (40_000_000, 1), (10, 200, 30))
    pixels = images.prepare(strip, Preprocessing())
    assert np.allclose(pixels[:, 5, 5] * 127.5 + 127.5, (10, 200, 30), atol=0.01)


def test_exif_orientation() -> None:
    picture = Image.new("RGB", (40, 20), "blue")
    picture.paste("red", (0, 0, 40, 5))  # red on top ...
    exif = Image.Exif()
    exif[0x0112] = 6  # ... of a picture to be turned by 90 degrees clockwise
    turned = images.read(encode(picture, "PNG", exif=exif))
    assert turned.size == (20, 40)
    assert turned.getpixel((18, 20)) == (255, 0, 0)
    assert turned.getpixel((2, 20)) == (0, 0, 255)


def test_palette_alpha_and_grey() -> None:
    palette = noise(20, 10).quantize(8)
    assert np.array_equal(np.asarray(images.read(encode(palette))), np.asarray(palette.convert("RGB")))
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    clear.putpixel((0, 0), (10, 20, 30, 255))
    clear.putpixel((1, 0), (0, 0, 0, 128))
    shown = images.read(encode(clear))
    assert shown.getpixel((3, 3)) == (255, 255, 255)
    assert shown.getpixel((0, 0)) == (10, 20, 30)
    assert abs(shown.getpixel((1, 0))[0] - 127) <= 1
    gif = Image.new("P", (4, 4), 0)
    gif.putpalette([200, 0, 0, 0, 200, 0])
    assert images.read(encode(gif, "GIF", transparency=0)).getpixel((1, 1)) == (255, 255, 255)
    for mode in ("1", "L", "LA", "YCbCr", "HSV"):
        assert images.read(noise(8, 8).convert("L" if mode == "LA" else "RGB").convert(mode)).mode == "RGB"


def test_cmyk() -> None:
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red = images.read(encode(cmyk, "JPEG", quality=100)).getpixel((4, 4))
    assert np.abs(np.array(red) - (255, 0, 0)).max() < 15


def test_sixteen_bits() -> None:
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)[None].repeat(4, 0)
    for data in (encode(Image.fromarray(ramp)), ramp, encode(Image.fromarray(ramp), "TIFF")):
        read = np.asarray(images.read(data))
        assert np.abs(read[0, :, 0] - ramp[0] / 257).max() <= 0.5


def test_animated_gives_the_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    for kind in ("GIF", "WEBP", "TIFF"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert images.read(data).getpixel((4, 4)) == (255, 0, 0)
    moved = Image.open(io.BytesIO(encode(frames[0], "GIF", save_all=True, append_images=frames[1:])))
    moved.seek(2)
    assert images.read(moved).getpixel((4, 4)) == (255, 0, 0)


def test_arrays(tmp_path: Path) -> None:
    array = RNG.integers(0, 256, (6, 5, 3), dtype=np.uint8)
    for form in (array, array / 255, (array / 255).astype(np.float16), array.astype(np.int64)):
        assert np.abs(np.asarray(images.read(form)).astype(int) - array).max() <= 1
    assert images.read(array[:, :, 0]).size == (5, 6)
    assert images.read(array[:, :, :1]).size == (5, 6)
    assert images.read(array > 100).mode == "RGB"
    file = tmp_path / "a.png"
    file.write_bytes(encode(Image.fromarray(array)))
    for source in (file, str(file), file.read_bytes(), io.BytesIO(file.read_bytes()), Image.open(file)):
        assert np.array_equal(np.asarray(images.read(source)), array)


def bomb() -> bytes:
    """A PNG of a few hundred bytes that claims 50,000 x 50,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(50_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


PHOTO = encode(noise(64, 48), "JPEG", quality=90)
BAD = {
    "empty": (b"", "is empty"),
    "text": (b"hello, I am no picture at all", "not a picture in a known format"),
    "truncated": (PHOTO[: len(PHOTO) // 2], "damaged"),
    "bomb": (bomb(), "more than the"),
    "large": (encode(Image.new("1", (12_000, 9_000))), "12000 x 9000"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "not a picture"),
    "NaN": (np.full((4, 4, 3), np.nan), "NaN"),
    "infinite": (np.full((4, 4), np.inf), "NaN or infinite"),
    "range": (np.full((4, 4, 3), 200.0), "from 0 to 1"),
    "negative": (np.full((4, 4, 3), -5), "not from 0 to 255"),
    "shape": (np.zeros((3, 4, 5)), "height, width"),
    "no pixels": (np.zeros((0, 4, 3), np.uint8), "no pixels"),
    "zero sized": (Image.new("RGB", (0, 7)), "0 x 7"),
    "NaN tiff": (encode(Image.fromarray(np.full((4, 4), np.nan, np.float32)), "TIFF"), "NaN"),
    "text array": (np.array([["a", "b"]]), "not numbers"),
    "kind": (3, "not int"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures_are_one_sentence(name: str) -> None:
    source, words = BAD[name]
    with pytest.raises(UserError) as caught:
        images.read(source)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_paths(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "is a folder"), (tmp_path / "no.png", "does not exist"), ("a\0b", "cannot be read")):
        with pytest.raises(UserError, match=words):
            images.read(path)


SEEDS = [
    encode(noise(17, 16), kind, **options)
    for kind, options in [
        ("PNG", {}), ("JPEG", {}), ("GIF", {}), ("BMP", {}), ("WEBP", {}), ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("PPM", {}), ("JPEG2000", {}), ("ICO", {"sizes": [(16, 16)]}), ("TGA", {}), ("MPO", {}),
    ]
]  # fmt: skip


def fuzz(data: bytes) -> None:
    sentence, picture = "", None
    try:
        picture = images.read(data)
    except UserError as error:
        sentence = str(error)
    assert "\n" not in sentence
    if picture is not None:
        assert picture.mode == "RGB"
        assert images.prepare(picture, Preprocessing()).shape == (3, 32, 32)


def damage(content: bytes, rng: np.random.Generator) -> bytes:
    """The file with some bytes changed, cut out or put in."""
    changed = bytearray(content)
    for _ in range(rng.integers(1, 9)):
        at, kind = int(rng.integers(0, max(1, len(changed)))), rng.integers(3)
        if kind == 0 and changed:
            changed[at] = rng.choice([0, 1, 127, 128, 255, rng.integers(256)])
        elif kind == 1:
            del changed[at : at + int(rng.integers(1, 40))]
        else:
            changed[at:at] = rng.bytes(int(rng.integers(1, 7)))
    return bytes(changed)


def test_fuzz_damaged_files() -> None:
    """6,000 valid files of every format, damaged: an answer or one sentence, never a crash."""
    rng = np.random.default_rng(1)
    for case in range(6000):
        fuzz(damage(SEEDS[case % len(SEEDS)], rng))


@settings(max_examples=1000, deadline=None)
@given(st.binary(max_size=200))
@example(b"\x89PNG\r\n\x1a\n")
@example(b"II*\x00\x08\x00\x00\x00\x01\x00")
def test_fuzz_reader_from_nothing(data: bytes) -> None:
    fuzz(data)


def test_walk(tmp_path: Path) -> None:
    for name in ("b/2.PNG", "b/1.jpg", "a/x.txt", "c.gif", ".hidden/3.png", "b/.4.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = [Path(p).relative_to(tmp_path).as_posix() for p in images.walk([str(tmp_path)])]
    assert found == ["b/1.jpg", "b/2.PNG", "c.gif"]
    assert list(images.walk(["-", str(tmp_path / "nowhere.png")])) == ["-", str(tmp_path / "nowhere.png")]
    assert [Path(p).name for p in images.walk([str(tmp_path / "b" / "*.jpg")])] == ["1.jpg"]
    assert list(images.walk([str(tmp_path / "*.webp")])) == [str(tmp_path / "*.webp")]


def test_view_is_what_the_model_sees() -> None:
    picture = noise(100, 60)
    seen = images.view(picture, Preprocessing((3, 32, 32), crop_pct=0.8))
    assert seen.size == (48, 48)
    assert images.view(noise(3, 300), Preprocessing((3, 32, 32), crop_mode="border")).size == (32, 32)


def test_frames_are_not_counted() -> None:
    """Counting the frames of a TIFF reads through all of it: a file of 3.6 MB took 8 seconds."""
    first = encode(noise(8, 8), "TIFF")
    at = struct.unpack("<I", first[4:8])[0]
    end = at + 2 + 12 * struct.unpack("<H", first[at : at + 2])[0]
    directory, count, start = first[at:end], 2000, len(first) + len(first) % 2
    offsets = [start + i * (len(directory) + 4) for i in range(count)]
    chain = b"".join(directory + struct.pack("<I", following) for following in [*offsets[1:], 0])
    data = (first[:end] + struct.pack("<I", start) + first[end + 4 :]).ljust(start, b"\0") + chain
    began = time.process_time()
    assert np.array_equal(np.asarray(images.read(data)), np.asarray(noise(8, 8)))
    taken = time.process_time() - began
    began = time.process_time()
    with Image.open(io.BytesIO(data)) as picture:
        assert picture.n_frames == count + 1
    assert taken < 0.2 * (time.process_time() - began)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "RGB"])
def test_transparency_in_parts_gives_the_same_pixels(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).integers(0, 256, (90, 120, 4), dtype=np.uint8)
    picture, options = Image.fromarray(values, "RGBA"), {}
    if mode in ("LA", "PA"):
        picture = picture.convert("LA").convert(mode)
    elif mode in ("P", "RGB"):
        picture = picture.convert("RGB") if mode == "RGB" else picture.convert("RGB").quantize(16)
        options = {"transparency": (1, 2, 3) if mode == "RGB" else 3}
    data = picture if mode == "PA" else encode(picture, **options)
    layers = (data if mode == "PA" else Image.open(io.BytesIO(data))).convert("RGBA")
    expected = Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")
    monkeypatch.setattr(images, "BAND", 120 * 7)  # 13 parts, the last of which is smaller
    assert np.array_equal(np.asarray(images.read(data)), np.asarray(expected))
    assert np.asarray(expected).min() < 100  # there is something to see


MEASURE = """
import sys, numpy as np
from odevit_serve.config import Preprocessing
from odevit_serve.data import images
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
data, own = open(sys.argv[1], "rb").read(), Preprocessing()
images.prepare(images.open_picture(np.zeros((64, 64, 4), np.uint8)), own)
before = peak()
images.prepare(images.open_picture(data, max_pixels=10**9), own)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16"])
def test_memory_a_pixel(tmp_path: Path, mode: str) -> None:
    """24 bytes a pixel before; now the picture and one copy of it."""
    side = 2000
    (tmp_path / "a.png").write_bytes(encode(Image.new(mode, (side, side))))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "a.png")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 13 * side * side


def test_a_jpeg_beyond_the_limit_is_decoded_at_a_smaller_size() -> None:
    picture = noise(800, 600)
    plain = encode(picture, "JPEG", quality=95)
    assert images.read(plain, max_pixels=480_000).size == (800, 600)
    assert images.read(plain, max_pixels=479_999).size == (400, 300)
    assert images.read(plain, max_pixels=30_000).size == (200, 150)
    own = Preprocessing((3, 32, 32))
    small, large = (images.prepare(images.open_picture(plain, max_pixels=n), own) for n in (120_000, 480_000))
    assert np.abs(small - large).mean() * 127.5 < 3
    for other in (encode(picture, "JPEG", progressive=True), encode(picture), plain[:2] + plain[2:] + b"\xff\xda"):
        with pytest.raises(UserError, match="800 x 600, more than the 479,999"):
            images.read(other, max_pixels=479_999)
    with pytest.raises(UserError, match="more than the 1,000"):
        images.read(plain, max_pixels=1000)


def test_a_picture_that_was_handed_over_is_left_as_it_was() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    own = Image.open(io.BytesIO(encode(Image.new("RGB", (40, 20)), "PNG", exif=exif)))
    assert images.read(own).size == (20, 40)
    assert own.size == (40, 20)


def test_shown_is_small_and_flat() -> None:
    seen = images.shown(encode(Image.new("RGBA", (900, 700), (0, 0, 0, 0))), Preprocessing(), 100)
    assert (seen.size, seen.mode, seen.getpixel((5, 5))) == ((100, 100), "RGB", (255, 255, 255))
