from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from odevit_serve.errors import UserError
from odevit_serve.train.photos_data import merge

TENCH, GOLDFISH, LION = "n01440764", "n01443537", "n02129165"


def tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Three sets, as a zip file, a folder and a tar file, whose classes overlap."""
    with zipfile.ZipFile(tmp_path / "tiny.zip", "w") as archive:
        archive.writestr(f"tiny-imagenet-200/train/{GOLDFISH}/images/{GOLDFISH}_0.JPEG", b"goldfish")
        archive.writestr("tiny-imagenet-200/val/images/val_0.JPEG", b"another goldfish")
        archive.writestr("tiny-imagenet-200/val/images/val_1.JPEG", b"goldfish")  # the same picture
        archive.writestr(
            "tiny-imagenet-200/val/val_annotations.txt", f"val_0.JPEG\t{GOLDFISH}\t0\nval_1.JPEG\t{GOLDFISH}\t0\n"
        )
    mini = tree(
        tmp_path / "mini",
        {
            f"train/{LION}/a.jpg": b"lion",
            f"val/{LION}/b.jpg": b"another lion",
            f"train/{GOLDFISH}/c.jpg": b"third goldfish",
            f"val/{GOLDFISH}/d.jpg": b"fourth goldfish",  # may be in Tiny-ImageNet's train
            f"train/{TENCH}/e.jpg": b"tench of mini",  # a class of Imagenette
        },
    )
    with tarfile.open(tmp_path / "nette.tgz", "w:gz") as tar:
        for name, content in (
            (f"imagenette2-160/train/{TENCH}/x.JPEG", b"tench"),
            ("imagenette2-160/val/tench/y.JPEG", b"y"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return tmp_path / "tiny.zip", mini, tmp_path / "nette.tgz"


def test_three_sets_become_one_without_a_picture_in_both_splits(
    sources: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    counts = merge(sources, tmp_path / "photos.zip")
    with zipfile.ZipFile(tmp_path / "photos.zip") as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    assert found == {
        f"train/{GOLDFISH}/tiny-{GOLDFISH}_0.JPEG": b"goldfish",
        f"train/{LION}/mini-a.jpg": b"lion",
        f"train/{GOLDFISH}/mini-c.jpg": b"third goldfish",
        f"train/{TENCH}/nette-x.JPEG": b"tench",
        f"val/{GOLDFISH}/tiny-val_0.JPEG": b"another goldfish",
        f"val/{LION}/mini-b.jpg": b"another lion",
        f"val/{TENCH}/nette-y.JPEG": b"y",
    }
    assert counts["left out", "tiny"] == counts["left out", "mini"] == 1


def test_the_command(sources: tuple[Path, Path, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "odevit_serve.train.photos_data", *map(str, sources), str(tmp_path / "photos.zip")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "train     mini         2" in ran.stdout


def test_what_is_no_data_set_is_said(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(UserError, match="neither a folder nor a zip or tar file"):
        merge((tmp_path / "text",) * 3, tmp_path / "photos.zip")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="none of the three has training pictures"):
        merge((tmp_path / "empty",) * 3, tmp_path / "photos.zip")
    assert not (tmp_path / "photos.zip").exists()
