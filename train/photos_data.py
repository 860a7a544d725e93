"""The data of the recipe `photos`, from three public downloads:

    python -m odevit_serve.train.photos_data TINY MINI NETTE photos.zip

TINY is Tiny-ImageNet-200 (64 px: `tiny-imagenet-200.zip`), MINI is mini-ImageNet as class folders in `train` and `val`
(84 px), NETTE is Imagenette (160 px: `imagenette2-160.tgz`). Each may be a folder, a zip or a tar file. The three are
merged by WordNet id. Pictures of `val` that also are in `train`, or that may be there because another set trains on
their class, are left out. All are photographs of ImageNet: for research and teaching, not for commercial use.
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError
from .class_names import wordnet_id

SUFFIXES = (".jpg", ".jpeg", ".png")


class Found(NamedTuple):
    source: str  # tiny, mini or nette
    split: str  # train or val
    wordnet: str
    name: str
    content: bytes

    @property
    def place(self) -> str:
        return f"{self.split}/{self.wordnet}/{self.source}-{self.name}"


def files(source: Path) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """The path and content of every file in a folder, a zip or a tar file."""
    if source.is_dir():
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            yield path.relative_to(source).parts, path.read_bytes()
    elif zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:
            for name in archive.namelist():
                if not name.endswith("/"):
                    yield tuple(name.split("/")), archive.read(name)
    elif source.is_file() and tarfile.is_tarfile(source):
        with tarfile.open(source) as tar:
            for member in tar:
                file = tar.extractfile(member)
                if file is not None:
                    yield tuple(member.name.split("/")), file.read()
    else:
        raise UserError(f"{source} is neither a folder nor a zip or tar file")


def tiny(source: Path) -> Iterator[Found]:
    """`train/WNID/images/...`, and `val/images/...` with the classes in a text file."""
    truth, waiting = dict[str, str](), list[tuple[str, bytes]]()
    for parts, content in files(source):
        if parts[-1] == "val_annotations.txt":
            truth = dict(line.split("\t")[:2] for line in content.decode().splitlines())  # type: ignore[misc]
        elif parts[-1].lower().endswith(SUFFIXES):
            if "train" in parts:
                yield Found("tiny", "train", parts[-1].split("_")[0], parts[-1], content)
            elif "val" in parts:
                waiting.append((parts[-1], content))
    if waiting and not truth:
        raise UserError(f"{source} has no val_annotations.txt: it is not Tiny-ImageNet-200")
    for name, content in waiting:
        yield Found("tiny", "val", truth[name], name, content)


def folders(name: str, source: Path) -> Iterator[Found]:
    """`train/CLASS/...` and `val/CLASS/...`, the class a WordNet id or a name of ImageNet."""
    for parts, content in files(source):
        if len(parts) > 2 and parts[-3] in ("train", "val") and parts[-1].lower().endswith(SUFFIXES):
            yield Found(name, parts[-3], wordnet_id(parts[-2]), parts[-1], content)


def merge(sources: tuple[Path, Path, Path], output: Path) -> Counter[tuple[str, str]]:
    """Write the zip file; the number of pictures by split (or `left out`) and source."""
    first, second, third = sources
    nette = list(folders("nette", third))
    its_classes = {found.wordnet for found in nette}
    mini = (
        found for found in folders("mini", second) if found.wordnet not in its_classes
    )  # Imagenette has more of them
    counts, trained, held, seen = Counter[tuple[str, str]](), dict[str, set[str]](), list[Found](), set[bytes]()
    with zipfile.ZipFile(output, "w") as archive:
        for group in (tiny(first), mini, nette):
            for found in group:
                if found.split == "val":
                    held.append(found)
                    continue
                archive.writestr(found.place, found.content)
                trained.setdefault(found.wordnet, set()).add(found.source)
                seen.add(hashlib.sha1(found.content).digest())
                counts["train", found.source] += 1
        for found in held:
            others = trained.get(found.wordnet, set()) - {found.source}
            known = hashlib.sha1(found.content).digest() in seen
            if known or (others and found.source != "tiny"):  # no picture of Tiny-ImageNet's val is in another's train
                counts["left out", found.source] += 1
            else:
                archive.writestr(found.place, found.content)
                counts["val", found.source] += 1
    if not trained:
        output.unlink()
        raise UserError("none of the three has training pictures")
    return counts


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    *given, target = map(Path, sys.argv[1:])
    try:
        for (split, source), count in sorted(merge((given[0], given[1], given[2]), target).items()):
            print(f"{split:9} {source:6} {count:7,}")
    except UserError as error:
        sys.exit(str(error))
