"""Pictures in, pixels out: reading whatever a user hands over, and the evaluation transform of a bundle.

The transform is that of timm for the same settings, done with Pillow and numpy.
"""

from __future__ import annotations

import glob
import io
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFile, ImageOps

from ..config import Preprocessing
from ..errors import UserError

# Formats that Pillow decodes by itself: no Ghostscript, no file that refers to another.
FORMATS = (
    "JPEG", "PNG", "GIF", "WEBP", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO", "TGA", "QOI",
)  # fmt: skip
SUFFIXES = frozenset({
    ".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm", ".avif", ".jp2",
    ".mpo", ".ico", ".tga", ".qoi",
})  # fmt: skip
MAX_PIXELS = 89_478_485  # Pillow's own line between a large picture and a decompression bomb
SERVED_PIXELS = 16_000_000  # what a server decodes: two at a time, in the format that takes most, are 780 MB
MAX_BYTES = 512 * 2**20
MAX_RESIZED = 2**22
BAND = 2**20  # pixels that are converted at a time where that takes more memory than the picture
# What is wrong with a file is told in one sentence of our own; Pillow's warnings would be a second voice.
warnings.filterwarnings("ignore", module=r"PIL\.")

RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def read(source: Any, name: str | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture in a path, bytes, open file, PIL image or array, as RGB and the right way up."""
    return _colour(open_picture(source, name, max_pixels))


def open_picture(source: Any, name: str | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The same as RGB or grey, which takes less memory: what `prepare` takes.

    A JPEG of more pixels is decoded at a half, quarter or eighth of its size where that fits; others are refused.
    """
    label = name or describe(source)
    if isinstance(source, Image.Image):
        return _convert(_first_frame(source), label, max_pixels)
    if isinstance(source, np.ndarray):
        return _from_array(source, label, max_pixels)
    if isinstance(source, bytes | bytearray | memoryview):
        return _decode(io.BytesIO(source), label, max_pixels)
    if isinstance(source, str | os.PathLike):
        return _read_path(Path(source), label, max_pixels)
    if hasattr(source, "read"):
        return _decode(io.BytesIO(source.read(MAX_BYTES)), label, max_pixels)
    raise UserError(f"{label}: a picture is a path, bytes, a PIL image or an array, not {type(source).__name__}")


def describe(source: Any) -> str:
    """A short name of a source, for messages and results."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, np.ndarray):
        return f"array of shape {list(source.shape)}"
    if isinstance(source, bytes | bytearray | memoryview):
        return f"{len(source)} bytes"
    return str(getattr(source, "filename", "") or getattr(source, "name", "") or type(source).__name__)


def _read_path(path: Path, label: str, max_pixels: int) -> Image.Image:
    try:
        if path.is_dir():
            raise UserError(f"{label} is a folder, not a picture")
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{label} has {path.stat().st_size:,} bytes, more than the {MAX_BYTES:,} allowed")
        with path.open("rb") as file:
            return _decode(file, label, max_pixels)
    except FileNotFoundError:
        raise UserError(f"{label} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise UserError(f"{label} cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _decode(file: Any, label: str, max_pixels: int) -> Image.Image:
    start = file.read(1)
    if not start:
        raise UserError(f"{label} is empty")
    file.seek(0)
    try:
        with Image.open(file, formats=FORMATS) as picture:
            if picture.width * picture.height > max_pixels:
                _reduce(picture, max_pixels)
            _check_size(picture.size, label, max_pixels)
            picture.load()
            ImageOps.exif_transpose(picture, in_place=True)
            return _convert(picture, label, max_pixels)
    except UserError:
        raise
    except Image.DecompressionBombError:
        raise UserError(f"{label} has more than the {max_pixels:,} pixels allowed") from None
    except Image.UnidentifiedImageError:
        raise UserError(f"{label} is not a picture in a known format") from None
    except Exception as error:  # decoders fail in every way there is, on data that anyone can send
        reason = str(error).strip().splitlines()
        raise UserError(f"{label} is damaged ({reason[0][:200] if reason else type(error).__name__})") from None


def _reduce(picture: ImageFile.ImageFile, max_pixels: int) -> None:
    """Have a JPEG decoded at the largest of the smaller sizes its format knows that has at most so many pixels.

    Only where it comes in one scan: of several, the decoder holds all coefficients at full size, whatever it gives.
    """
    if picture.format not in ("JPEG", "MPO") or picture.info.get("progressive") or _scans(picture) > 1:
        return
    for scale in (2, 4, 8):
        size = (-(-picture.width // scale), -(-picture.height // scale))
        if size[0] * size[1] <= max_pixels:
            picture.draft(None, size)
            return


def _scans(picture: ImageFile.ImageFile) -> int:
    """Scans of a JPEG whose header was read; a scan begins with FF DA, which occurs nowhere inside of one."""
    file: Any = picture.fp
    at = file.tell()
    count = 1 + file.read().count(b"\xff\xda")
    file.seek(at)
    return count


def _first_frame(picture: Image.Image) -> Image.Image:
    """The first of several, the right way up; frames are not counted, which would read through the whole file."""
    if picture.tell():
        picture.seek(0)
    return ImageOps.exif_transpose(picture)


def _check_size(size: tuple[int, int], label: str, max_pixels: int) -> None:
    width, height = size
    if width * height == 0:
        raise UserError(f"{label} has no pixels: it is {width} x {height}")
    if width * height > max_pixels:
        raise UserError(f"{label} is {width} x {height}, more than the {max_pixels:,} pixels allowed")


def _convert(picture: Image.Image, label: str, max_pixels: int) -> Image.Image:
    """A picture that was turned upright as RGB or L, transparent parts on white."""
    _check_size(picture.size, label, max_pixels)
    mode = picture.mode
    if "transparency" in picture.info or mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        return _on_white(picture)
    if mode in ("RGB", "L"):
        return picture
    if mode == "F":
        return _from_array(np.asarray(picture), label, max_pixels)
    if mode.startswith("I"):
        return Image.fromarray(_narrow(np.asarray(picture)))
    return picture.convert("L" if mode == "1" else "RGB")


def _bands(array: np.ndarray, convert: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`convert` to bytes, some rows at a time: what it allocates on the way is larger than what it gives."""
    made = np.empty(array.shape, np.uint8)
    rows = max(1, BAND // max(1, array[0].size))
    for at in range(0, len(array), rows):
        made[at : at + rows] = convert(array[at : at + rows])
    return made


def _narrow(values: np.ndarray) -> np.ndarray:
    """16-bit grey to 8: Pillow would clip at 255 and leave a white picture."""
    return _bands(values, lambda part: np.rint(np.clip(part, 0, 65535).astype(np.float32) / 257))


def _on_white(picture: Image.Image) -> Image.Image:
    """What a viewer shows of a picture with transparency, some rows at a time: the layers take 20 bytes a pixel."""
    canvas = Image.new("RGB", picture.size)
    rows = max(1, BAND // picture.width)
    for top in range(0, picture.height, rows):
        part = picture.crop((0, top, picture.width, min(top + rows, picture.height)))
        part = (part.convert("LA") if part.mode == "La" else part).convert("RGBA")
        white = Image.new("RGBA", part.size, "white")
        canvas.paste(Image.alpha_composite(white, part).convert("RGB"), (0, top))
    return canvas


def _colour(picture: Image.Image) -> Image.Image:
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _from_array(array: np.ndarray, label: str, max_pixels: int) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise UserError(f"{label}: a picture has shape [height, width] or [height, width, 3 or 4]")
    if array.size == 0:
        raise UserError(f"{label} has no pixels")
    if array.shape[0] * array.shape[1] > max_pixels:
        raise UserError(f"{label} has more than the {max_pixels:,} pixels allowed")
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    elif array.dtype == np.uint16:
        array = _narrow(array)
    elif np.issubdtype(array.dtype, np.floating):
        array = _from_floats(array, label)
    elif array.dtype != np.uint8:
        if not np.issubdtype(array.dtype, np.integer):
            raise UserError(f"{label}: pixels of type {array.dtype} are not numbers from 0 to 255")
        if array.min() < 0 or array.max() > 255:
            raise UserError(f"{label}: pixels range from {array.min()} to {array.max()}, not from 0 to 255")
        array = array.astype(np.uint8)
    return _convert(Image.fromarray(np.ascontiguousarray(array)), label, max_pixels)


def _from_floats(array: np.ndarray, label: str) -> np.ndarray:
    low, high = float(array.min()), float(array.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(f"{label} has NaN or infinite pixels")
    if low < 0 or high > 1:
        raise UserError(f"{label}: pixels range from {low:g} to {high:g}; floating-point pictures go from 0 to 1")
    return _bands(array, lambda part: np.rint(part * 255))


def prepare(picture: Image.Image, transform: Preprocessing) -> np.ndarray:
    """Pixel values [3,H,W] as the model wants them: resized, cropped, normalised."""
    _, height, width = transform.input_size
    return normalised(_fit(picture, transform, (width, height)), transform)


def normalised(picture: Image.Image, transform: Preprocessing) -> np.ndarray:
    """Pixel values [3,H,W] of a picture that has the size the model wants."""
    channels, height, width = transform.input_size
    if channels == 1:
        picture = picture.convert("L")
    pixels = np.asarray(picture, np.float32).reshape(height, width, channels)
    mean, std = np.array(transform.mean, np.float32), np.array(transform.std, np.float32)
    return np.ascontiguousarray(((pixels / 255 - mean) / std).transpose(2, 0, 1), np.float32)


def view(picture: Image.Image, transform: Preprocessing) -> Image.Image:
    """The part of the picture that the model sees, at the picture's own resolution."""
    _, height, width = transform.input_size
    padding, box = _window(picture.size, transform, (width, height))
    if padding:
        return _fit(picture, transform, (width, height))
    left, top = min(round(box[0]), picture.width - 1), min(round(box[1]), picture.height - 1)
    return picture.crop((left, top, max(left + 1, round(box[2])), max(top + 1, round(box[3]))))


def shown(source: Any, transform: Preprocessing, side: int | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The same of anything that `read` takes; with `side`, at most that many pixels wide and high."""
    seen = view(open_picture(source, max_pixels=max_pixels), transform)
    if side is not None:
        seen.thumbnail((side, side))
    return _colour(seen)


def _fit(picture: Image.Image, transform: Preprocessing, size: tuple[int, int]) -> Image.Image:
    """Resize and centre-crop, with borders where the picture does not fill the canvas; as RGB."""
    padding, box = _window(picture.size, transform, size)
    resized = _resized(picture.size, transform, size)
    land = padding or (0, 0, *size)
    inner = (land[2] - land[0], land[3] - land[1])
    method = RESAMPLING[transform.interpolation]
    if resized[0] * resized[1] <= MAX_RESIZED:
        whole = picture if resized == picture.size else picture.resize(resized, method)
        left, top = round(max(0, resized[0] - size[0]) / 2.0), round(max(0, resized[1] - size[1]) / 2.0)
        part = whole.crop((left, top, left + inner[0], top + inner[1]))
    else:  # a strip that would take gigabytes on its way: compute only what is kept, at the price of a few grey levels
        part = picture.resize(inner, method, box=box)
    part = _colour(part)
    if not padding:
        return part
    fill = tuple(round(255 * m) for m in transform.mean) if transform.crop_mode == "border" else (0, 0, 0)
    canvas = Image.new("RGB", size, fill if len(fill) == 3 else fill * 3)
    canvas.paste(part, padding[:2])
    return canvas


def _window(
    own: tuple[int, int], transform: Preprocessing, size: tuple[int, int]
) -> tuple[tuple[int, int, int, int] | None, tuple[float, float, float, float]]:
    """Where the resized picture lands on the canvas (None: it fills it), and the box of the picture that it shows."""
    resized = _resized(own, transform, size)
    land, box = [], []
    for i in range(2):
        length, target, scale = resized[i], size[i], own[i] / resized[i]
        if length < target:
            start = (target - length) // 2
            land.append((start, start + length))
            box.append((0.0, float(own[i])))
        else:
            start = round((length - target) / 2.0)
            land.append((0, target))
            box.append((start * scale, min((start + target) * scale, own[i])))
    fills = all(land[i] == (0, size[i]) for i in range(2))
    where = None if fills else (land[0][0], land[1][0], land[0][1], land[1][1])
    return where, (box[0][0], box[1][0], box[0][1], box[1][1])


def _resized(own: tuple[int, int], transform: Preprocessing, size: tuple[int, int]) -> tuple[int, int]:
    """The size that timm resizes to before it crops. Sizes are (width, height)."""
    scaled = (math.floor(size[0] / transform.crop_pct), math.floor(size[1] / transform.crop_pct))
    if transform.crop_mode == "squash":
        return scaled
    if transform.crop_mode == "border" or scaled[0] != scaled[1]:
        ratios = (own[0] / scaled[0], own[1] / scaled[1])
        ratio = max(ratios) if transform.crop_mode == "border" else min(ratios)
        return max(1, round(own[0] / ratio)), max(1, round(own[1] / ratio))
    short, long = min(own), max(own)
    stretched = int(scaled[0] * long / short)
    return (scaled[0], stretched) if own[0] <= own[1] else (stretched, scaled[0])


def walk(paths: Sequence[str]) -> Iterator[str]:
    """Files that the arguments stand for: files, folders (searched for pictures), globs, `-` for standard input.

    What does not exist is handed on as it is, so that reading it gives the error. Of a folder only the names in one
    directory are held at a time.
    """
    for path in paths:
        if path != "-" and os.path.isdir(path):
            yield from _folder(path)
        elif path != "-" and not os.path.exists(path) and glob.has_magic(path):
            matches = sorted(glob.iglob(path, recursive=True))
            yield from walk(matches) if matches else [path]
        else:
            yield path


def _folder(path: str) -> Iterator[str]:
    try:
        names = sorted(os.listdir(path))
    except OSError:
        yield path
        return
    for name in names:
        if name.startswith("."):
            continue
        child = os.path.join(path, name)
        if os.path.splitext(name)[1].lower() in SUFFIXES:
            yield child
        elif os.path.isdir(child):
            yield from _folder(child)
