"""Photographs without labels, added to the zip file of a data set whose classes are ImageNet's:

    python -m odevit_serve.train.unlabelled DATA.zip PHOTOGRAPHS TEACHER.safetensors [--most 150] [--limit 60000]

PHOTOGRAPHS is a folder, zip or tar file of any photographs (`train2017.zip` of COCO, say), TEACHER the weights of an
ImageNet ViT. Of each class of the data at most so many are taken: those that the teacher is surest of. Its answers
only choose; what a student learns from them is asked for in training. Pictures are stored with a shorter side of 256
pixels at most.
"""

from __future__ import annotations

import argparse
import io
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..config import Architecture, Preprocessing
from ..data.datasets import open_splits
from ..data.images import prepare, read
from ..errors import UserError
from .photos_data import SUFFIXES, files
from .progress import counted
from .recipe import Teaching
from .teacher import choose_classes
from .teacher_sources import load_teacher

FOLDER = "unlabelled"
SIDE = 256  # of what is stored, the shorter one
SIZE = 128  # that the teacher sees here: it only chooses
BATCH = 64
QUALITY = 92


def surest(classes: np.ndarray, certainty: np.ndarray, most: int) -> np.ndarray:
    """The positions of the `most` surest answers of each class, in order."""
    order = np.lexsort((-certainty, classes))
    sorted_classes = classes[order]
    rank = np.arange(len(order)) - np.searchsorted(sorted_classes, sorted_classes)
    chosen: np.ndarray = np.sort(order[rank < most])
    return chosen


def pictures(source: Path, limit: int) -> Iterator[tuple[str, bytes]]:
    found = 0
    for parts, content in files(source):
        if parts[-1].lower().endswith(SUFFIXES):
            yield parts[-1], content
            found += 1
            if found == limit:
                return


def answers(
    source: Path, limit: int, ask: Callable[[Tensor], Tensor], spec: Preprocessing, advance: Callable[[int], None]
) -> tuple[np.ndarray, np.ndarray]:
    """The teacher's class of each picture and its probability; that of one that cannot be read is 0."""
    classes, certainty, waiting = [], [], list[np.ndarray]()

    def flush() -> None:
        if waiting:
            probability, answer = ask(torch.from_numpy(np.stack(waiting))).softmax(-1).max(-1)
            classes.append(answer.numpy())
            certainty.append(probability.float().numpy())
            advance(len(waiting))
            waiting.clear()

    for name, content in pictures(source, limit):
        try:
            waiting.append(prepare(read(content, name), spec))
        except UserError:
            flush()
            classes.append(np.zeros(1, np.int64))
            certainty.append(np.zeros(1, np.float32))
        if len(waiting) == BATCH:
            flush()
    flush()
    if not classes:
        raise UserError(f"{source} has no pictures ({', '.join(SUFFIXES)})")
    return np.concatenate(classes), np.concatenate(certainty)


def stored(content: bytes, name: str) -> bytes:
    """The picture as it is, or scaled down to what is stored."""
    picture = read(content, name)
    shorter = min(picture.size)
    if shorter <= SIDE:
        return content
    size = (round(picture.width * SIDE / shorter), round(picture.height * SIDE / shorter))
    with io.BytesIO() as file:
        picture.resize(size, Image.Resampling.LANCZOS).save(file, "JPEG", quality=QUALITY)
        return file.getvalue()


def add(data: Path, source: Path, weights: Path, most: int, limit: int, say: Callable[[str], None]) -> Counter[str]:
    """Add photographs to the zip file; gives how many of each class the teacher takes them for."""
    splits = open_splits(data)
    if FOLDER in splits:
        raise UserError(f"{data} has photographs without labels already")
    names: Sequence[str] = splits["train"].classes
    teacher = load_teacher(Teaching(weights=str(weights), image_size=SIZE, patch_size=16), Architecture())
    choose_classes(teacher, names)
    teacher.eval()
    spec = Preprocessing((3, SIZE, SIZE), crop_pct=1.0)
    total = limit or sum(1 for _ in pictures(source, 0))
    with torch.inference_mode(), counted(say, "answers of the teacher", total) as advance:
        classes, certainty = answers(source, limit, teacher, spec, advance)
    chosen = {row for row in surest(classes, certainty, most).tolist() if certainty[row]}
    with zipfile.ZipFile(data, "a") as archive:
        for row, (name, content) in enumerate(pictures(source, limit)):
            if row in chosen:
                archive.writestr(f"{FOLDER}/{row:06}-{Path(name).stem}.jpg", stored(content, name))
    return Counter(names[c] for c in classes[sorted(chosen)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--most", type=int, default=150, help="of each class")
    parser.add_argument("--limit", type=int, default=0, help="look at so many photographs; 0: all")
    asked = parser.parse_args()
    try:
        counts = add(
            asked.data, asked.photographs, asked.teacher, asked.most, asked.limit, lambda m: print(m, file=sys.stderr)
        )
    except UserError as error:
        sys.exit(str(error))
    print(f"{counts.total():,} photographs added, of {len(counts)} classes")
