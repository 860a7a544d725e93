"""Folders as people have them: each works, or ends in one sentence before the work starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odevit_serve.config import Division, Preprocessing
from odevit_serve.data.images import prepare
from odevit_serve.errors import UserError
from odevit_serve.train.photographs import Part, look_through, open_parts

SPEC = Preprocessing((3, 16, 16), crop_pct=0.9)
DIVISION = Division(0.2, 0.2, 0)


def photo(path: Path, seed: int, size: tuple[int, int] = (40, 30), **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(("Bäume im Mai", "Häuser")):
        for i in range(10):
            photo(tmp_path / "photos" / name / "2024" / f"{i}.png", 100 * number + i)
    return tmp_path / "photos"


def look(folder: Path) -> tuple[dict[str, Part], str]:
    said: list[str] = []
    named, _ = open_parts(str(folder), DIVISION, said.append)
    return look_through(named, SPEC, said.append), "\n".join(said)


def names(parts: dict[str, Part]) -> list[str]:
    return [name for part in parts.values() for name in part.images.names]


def test_subfolders_spaces_and_umlauts(folder: Path) -> None:
    parts, said = look(folder)
    assert said == "20 photographs of 2 classes, 10 each"
    assert {role: len(part) for role, part in parts.items()} == {"calibration": 4, "validation": 4, "train": 12}
    assert parts["train"].images.classes == ("Bäume im Mai", "Häuser")
    assert len(set(names(parts))) == 20
    part = parts["train"]
    first = next(part.batches(SPEC, 4))
    for row in range(4):  # the very pixels that serving sees
        np.testing.assert_array_equal(first[row].numpy(), prepare(part.images.read(row), SPEC))
    assert part.small.read(0).size == (32, 24)
    assert part.small.in_memory


def test_copies_are_found_by_content_and_said(folder: Path) -> None:
    original = folder / "Häuser" / "2024" / "3.png"
    shutil.copy(original, folder / "Häuser" / "copy.png")
    with Image.open(original) as picture:
        picture.save(folder / "Häuser" / "same pixels.bmp")
    parts, said = look(folder)
    assert "2 copies are left out" in said
    assert len(names(parts)) == 20
    shutil.copy(original, folder / "Bäume im Mai" / "wrong.png")
    parts, said = look(folder)
    assert "in two classes and left out of both" in said
    assert len(names(parts)) == 19
    assert not any(name.endswith(("wrong.png", "copy.png", "Häuser/2024/3.png")) for name in names(parts))


def test_broken_and_foreign_files_are_named_and_left_out(folder: Path) -> None:
    (folder / "Häuser" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")
    (folder / "Häuser" / "phone.HEIC").write_bytes(b"anything")
    photo(folder / "Häuser" / "new.avif", 77)
    parts, said = look(folder)
    assert "left out, since Pillow does not read .heic: Häuser/phone.HEIC" in said
    assert "1 cannot be read and are left out: Häuser/broken.jpg (is damaged" in said
    assert len(names(parts)) == 21
    assert "Häuser/new.avif" in names(parts)


def test_pictures_are_turned_as_the_camera_says(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo(folder / "Häuser" / "turned.jpg", 5, exif=exif)
    parts, _ = look(folder)
    (part, row) = next((p, p.images.names.index("Häuser/turned.jpg")) for p in parts.values()
                       if "Häuser/turned.jpg" in p.images.names)  # fmt: skip
    assert part.images.read(row).size == (30, 40)
    assert part.small.read(row).size == (24, 32)


def test_few_and_many_in_a_class(tmp_path: Path) -> None:
    for name, count in (("one", 1), ("five", 5), ("many", 60)):
        for i in range(count):
            photo(tmp_path / name / f"{i}.png", 1000 * ord(name[0]) + i)
    parts, said = look(tmp_path)
    assert "from 1 (one) to 60 (many) in a class" in said
    assert "each is drawn equally often" in said
    assert "warning: nothing is set aside to choose the model by in one: too few photographs" in said
    counts = {role: np.bincount(part.labels, minlength=3).tolist() for role, part in parts.items()}
    assert counts == {"calibration": [1, 10, 0], "validation": [1, 12, 0], "train": [3, 38, 1]}


def one_class(folder: Path) -> None:
    shutil.rmtree(folder / "Häuser")


def no_classes(folder: Path) -> None:
    for i, path in enumerate(sorted(folder.rglob("*.png"))):
        path.rename(folder / f"{i}.png")


def two_each(folder: Path) -> None:
    for path in folder.rglob("*.png"):
        if int(path.stem) > 1:
            path.unlink()


def all_foreign(folder: Path) -> None:
    (folder / "Autos").mkdir()
    (folder / "Autos" / "1.heic").write_bytes(b"x")


def all_broken(folder: Path) -> None:
    for path in (folder / "Häuser").rglob("*.png"):
        path.write_bytes(b"not a picture")


def beside(folder: Path) -> None:
    photo(folder / "loose.png", 1)


def not_text(folder: Path) -> None:
    (folder / "Häuser").rename(folder / "a\nb")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (one_class, "has no two class folders: put the photographs of each class into a folder of its own"),
        (no_classes, "has no two class folders"),
        (two_each, "no class has 3 photographs"),
        (all_foreign, "Autos has no picture that Pillow reads, only .heic: convert them to JPEG"),
        (all_broken, "no photograph that can be used is left to learn from in Häuser"),
        (beside, "loose.png lies beside class folders, not in one"),
        (not_text, "is not text that can be shown: rename it"),
    ],
)
def test_what_cannot_work_is_one_sentence(folder: Path, change: Callable[[Path], None], message: str) -> None:
    change(folder)
    with pytest.raises(UserError) as error:
        look(folder)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_classes_without_a_third_part_are_measured_on_those_that_choose(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for i in range(3):
            photo(tmp_path / name / f"{i}.png", ord(name) * 10 + i)
    said: list[str] = []
    named, division = open_parts(str(tmp_path), DIVISION, said.append)
    assert division.calibration == 0
    parts = look_through(named, SPEC, said.append)
    assert {role: len(part) for role, part in parts.items()} == {"calibration": 0, "validation": 2, "train": 4}
