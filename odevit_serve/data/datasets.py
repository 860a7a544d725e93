"""Labelled pictures on disk: folders, zip files read in place, CIFAR files, `datasets` names. No torch needed.

`open_splits` is the one door: it says which splits a source has and gives each as an `Images`, from which single
pictures are read on demand. Nothing is ever unpickled but CIFAR's own batches, by a reader that admits arrays only.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MissingExtra, UserError
from .images import SUFFIXES
from .images import read as read_picture

if TYPE_CHECKING:
    from PIL import Image

SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
    "unlabelled": ("unlabelled", "unlabeled"),
}
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Images:
    """A list of pictures: names, labels (None: unlabelled) and a function that reads the i-th one."""

    names: Sequence[str]
    labels: np.ndarray | None
    classes: tuple[str, ...]
    read: Callable[[int], Image.Image]
    in_memory: bool = False  # nothing to decode: worker processes would not pay
    stamp: Callable[[int], str] = str  # changes whenever the content of the i-th picture does, without decoding it

    def __len__(self) -> int:
        return len(self.names)

    def subset(self, indices: Sequence[int] | np.ndarray) -> Images:
        chosen = np.asarray(indices, dtype=np.int64)
        read, stamp = self.read, self.stamp
        return replace(
            self,
            names=[self.names[i] for i in chosen],
            labels=None if self.labels is None else self.labels[chosen],
            read=lambda i: read(int(chosen[i])),
            stamp=lambda i: stamp(int(chosen[i])),
        )

    def sample(self, limit: int, seed: int) -> Images:
        """So many of the images, chosen by seed; all of them where there are no more."""
        return self.subset(np.sort(np.random.default_rng((seed, 3)).permutation(len(self))[:limit]))

    def with_unlabelled(self, more: Images) -> Images:
        """These images and others without labels, whose label is -1."""
        own, labels = len(self), np.zeros(0, np.int64) if self.labels is None else self.labels
        return Images(
            [*self.names, *more.names],
            np.concatenate([labels, np.full(len(self) + len(more) - len(labels), -1, np.int64)]),
            self.classes,
            lambda i: self.read(i) if i < own else more.read(i - own),
            self.in_memory and more.in_memory,
            lambda i: self.stamp(i) if i < own else more.stamp(i - own),
        )

    def digest(self) -> str:
        """Changes whenever one of the pictures, their order or their names do."""
        known = hashlib.sha256()
        for index, name in enumerate(self.names):
            known.update(f"{name}\0{self.stamp(index)}\n".encode("utf-8", "surrogateescape"))
        return known.hexdigest()


def open_splits(source: str | os.PathLike[str]) -> dict[str, Images]:
    """The splits of a source; one without split folders is given whole as `train`."""
    text = os.fspath(source)
    if text.startswith("hf:"):
        return _hub(text[3:])
    path = Path(text)
    if not path.exists():
        raise UserError(f"no such file or folder: {path}")
    if path.is_dir():
        cifar = _cifar_folder(path)
        return cifar if cifar else _tree(*_walk(path), where=str(path))
    if path.suffix == ".npz":
        return _npz(path)
    if zipfile.is_zipfile(path):
        return _zip(path)
    raise UserError(f"{path} is neither an image folder, a zip file nor an .npz file")


def held_out(splits: dict[str, Images]) -> Images:
    """The split a finished model is measured on: `test`, else `val`, else all there is."""
    return splits.get("test") or splits.get("val") or splits["train"]


Member = Callable[[PurePosixPath], Any]


def _walk(root: Path) -> tuple[list[PurePosixPath], Member, Member]:
    found = []
    for folder, subfolders, files in os.walk(root, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        found += [Path(folder, name) for name in sorted(files) if not name.startswith(".")]
    members = [PurePosixPath(p.relative_to(root).as_posix()) for p in found if p.suffix.lower() in SUFFIXES]

    def stamp(member: PurePosixPath) -> str:
        facts = (root / member).stat()
        return f"{facts.st_size} {facts.st_mtime_ns}"

    return members, lambda member: _decode(root / member, str(member)), stamp


def _zip(path: Path) -> dict[str, Images]:
    try:
        with zipfile.ZipFile(path) as archive:
            checksums = {entry.filename: entry.CRC for entry in archive.infolist()}
    except zipfile.BadZipFile as error:
        raise UserError(f"{path} is a damaged zip file ({error})") from None
    members = [PurePosixPath(n) for n in sorted(checksums) if PurePosixPath(n).suffix.lower() in SUFFIXES]
    members = [m for m in members if not any(part.startswith((".", "__MACOSX")) for part in m.parts)]
    archives: dict[int, zipfile.ZipFile] = {}  # a file handle must not be shared with a forked reader

    def read(member: PurePosixPath) -> Image.Image:
        pid = os.getpid()
        if pid not in archives:
            archives[pid] = zipfile.ZipFile(path)
        return _decode(archives[pid].read(str(member)), str(member))

    return _tree(members, read, lambda member: str(checksums[str(member)]), where=str(path))


def _decode(source: Path | bytes, name: str) -> Image.Image:
    return read_picture(source, name)  # as predict reads them: transparent ones on white


def _tree(members: Iterable[PurePosixPath], read: Member, stamp: Member, where: str) -> dict[str, Images]:
    """Splits and classes by the folders that members lie in, below any folders that all have in common."""
    paths = list(members)
    if not paths:
        raise UserError(f"{where} has no images ({', '.join(sorted(SUFFIXES))})")
    shared = Path(os.path.commonpath([m.parent for m in paths])).parts
    relative = [m.parts[len(shared) :] for m in paths]
    aliases = {alias: name for name, known in SPLITS.items() for alias in known}
    tops = {parts[0] for parts in relative if len(parts) > 1}
    if not tops or not tops <= set(aliases):  # the split folder may be what all have in common
        groups = {"train": list(range(len(paths)))}
        depth = 0
    else:
        groups, depth = {}, 1
        for i, parts in enumerate(relative):
            groups.setdefault(aliases[parts[0]] if len(parts) > 1 else "train", []).append(i)
    labelled = (relative[i] for split, chosen in groups.items() if split != "unlabelled" for i in chosen)
    classes = tuple(sorted({parts[depth] for parts in labelled if len(parts) > depth + 1}))
    index = {name: i for i, name in enumerate(classes)}
    splits = {}
    for split, chosen in groups.items():
        own = [paths[i] for i in chosen]
        labels = None
        if classes and split != "unlabelled":
            flat = [i for i in chosen if len(relative[i]) <= depth + 1]
            if flat:
                raise UserError(f"{where}: {paths[flat[0]]} lies beside class folders, not in one")
            labels = np.array([index[relative[i][depth]] for i in chosen])
            _check_classes(labels, classes, f"{where} ({split})", split == "train" or len(groups) == 1)
        splits[split] = Images(
            [str(m) for m in own],
            labels,
            () if labels is None else classes,
            lambda i, own=own: read(own[i]),  # type: ignore[misc]
            stamp=lambda i, own=own: stamp(own[i]),  # type: ignore[misc]
        )
    return splits


def _check_classes(labels: np.ndarray, classes: Sequence[str], where: str, every: bool) -> None:
    """Labels stand for classes; in the split that is learned from, `every` class has images."""
    counts = np.bincount(labels, minlength=len(classes))
    if len(counts) > len(classes):
        raise UserError(f"{where}: label {len(counts) - 1} for {len(classes)} classes")
    if every and not counts.all():
        raise UserError(f"{where}: class {classes[int(np.argmin(counts))]!r} has no images")


def _arrays(x: np.ndarray, y: np.ndarray | None, classes: Sequence[str], where: str, every: bool = True) -> Images:
    from PIL import Image

    if x.ndim != 4 or x.shape[-1] not in (1, 3) or x.dtype != np.uint8:
        raise UserError(f"{where}: images must be uint8 of shape (n, height, width, 3), not {x.dtype} {x.shape}")
    labels = None if y is None else np.asarray(y).reshape(-1).astype(np.int64)
    if labels is not None and len(labels) != len(x):
        raise UserError(f"{where}: {len(x)} images but {len(labels)} labels")
    if len(x) == 0:
        raise UserError(f"{where} has no images")
    if labels is not None:
        classes = tuple(classes) or tuple(str(i) for i in range(int(labels.max()) + 1))
        _check_classes(labels, classes, where, every)
    return Images(
        [f"{where}[{i}]" for i in range(len(x))],
        labels,
        tuple(classes) if labels is not None else (),
        lambda i: Image.fromarray(x[i].squeeze()).convert("RGB"),
        in_memory=True,
        stamp=lambda i: str(zlib.crc32(x[i].tobytes())),
    )


def _npz(path: Path) -> dict[str, Images]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read as .npz arrays ({error})") from None
    names = arrays.get("classes")
    classes: tuple[str, ...] = tuple(str(n) for n in names) if names is not None else ()
    splits = {}
    for split, suffix in (("train", "_train"), ("val", "_val"), ("test", "_test"), ("train", "")):
        x, y = arrays.get("x" + suffix), arrays.get("y" + suffix)
        if x is not None and split not in splits:
            known = classes or (CIFAR10 if x.shape[1:] == (32, 32, 3) and y is not None and y.max() == 9 else ())
            every = split == "train" or "train" not in splits
            splits[split] = _arrays(x, y, known, f"{path.name}:x{suffix}", every)
    if not splits:
        raise UserError(f"{path} has no array x_train, x_test or x, but {', '.join(arrays) or 'nothing'}")
    return splits


class _ArraysOnly(pickle.Unpickler):
    """Reads the official CIFAR batches; any other object in the file is refused."""

    allowed = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a CIFAR batch")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _read_batch(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise UserError(f"{path} is not a CIFAR batch ({error})") from None
    if not isinstance(batch, dict):
        raise UserError(f"{path} is not a CIFAR batch")
    return batch


def _planes(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _cifar_folder(root: Path) -> dict[str, Images] | None:
    """CIFAR-10/100 as published, python or binary layout, in `root` or in the folder its archive makes."""
    layouts: list[tuple[str, str, list[str], str, str]] = [
        ("cifar-10-batches-py", "fine", [f"data_batch_{i}" for i in range(1, 6)], "test_batch", "batches.meta"),
        ("cifar-100-python", "fine", ["train"], "test", "meta"),
        (
            "cifar-10-batches-bin",
            "",
            [f"data_batch_{i}.bin" for i in range(1, 6)],
            "test_batch.bin",
            "batches.meta.txt",
        ),
        ("cifar-100-binary", "", ["train.bin"], "test.bin", "fine_label_names.txt"),
    ]
    for name, kind, train, test, meta in layouts:
        for folder in (root / name, root):
            if not all((folder / part).is_file() for part in [*train, test]):
                continue
            splits = {}
            for split, parts in (("train", train), ("test", [test])):
                if kind:
                    batches = [_read_batch(folder / part) for part in parts]
                    key = "fine_labels" if "fine_labels" in batches[0] else "labels"
                    try:
                        x = _planes(np.concatenate([b["data"] for b in batches]))
                        y = np.concatenate([np.asarray(b[key]) for b in batches])
                    except (KeyError, ValueError) as error:
                        raise UserError(f"{folder} is not CIFAR's python layout ({error})") from None
                else:
                    extra = 2 if "100" in name else 1
                    raw = b"".join((folder / part).read_bytes() for part in parts)
                    if len(raw) % (3072 + extra):
                        raise UserError(f"{folder}: {len(raw)} bytes are not whole records of {3072 + extra}")
                    records = np.frombuffer(raw, np.uint8).reshape(-1, 3072 + extra)
                    x, y = _planes(records[:, extra:]), records[:, extra - 1].astype(np.int64)
                splits[split] = _arrays(x, y, _cifar_names(folder / meta), f"{folder.name}/{split}")
            return splits
    return None


def _cifar_names(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        return ()
    if path.suffix == ".txt":
        return tuple(path.read_text().split())
    batch = _read_batch(path)
    return tuple(batch.get("fine_label_names") or batch.get("label_names") or ())


def _hub(name: str) -> dict[str, Images]:
    try:
        import datasets
    except ImportError:
        raise MissingExtra("train") from None
    try:
        loaded = datasets.load_dataset(*name.split("@", 1))
    except Exception as error:  # the library's failures have no common base class
        raise UserError(f"datasets could not load {name!r}: {str(error).strip().splitlines()[0]}") from None
    aliases = {alias: split for split, known in SPLITS.items() for alias in known}
    return {aliases.get(split, split): _hub_split(rows, f"hf:{name}/{split}") for split, rows in loaded.items()}


def _hub_split(rows: Any, where: str) -> Images:
    import datasets

    pictures = [key for key, feature in rows.features.items() if isinstance(feature, datasets.Image)]
    if not pictures:
        raise UserError(f"{where} has no image column, only {', '.join(rows.features)}")
    named = [key for key, feature in rows.features.items() if isinstance(feature, datasets.ClassLabel)]
    label = next((key for key in ("fine_label", "label", *named) if key in rows.features), None)
    labels = None if label is None else np.array(rows[label], dtype=np.int64)
    feature = rows.features.get(label) if label else None
    classes = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else ()
    if labels is not None and not classes:
        classes = tuple(str(i) for i in range(int(labels.max()) + 1))
    column = pictures[0]
    return Images(
        [f"{where}[{i}]" for i in range(len(rows))],
        labels,
        classes,
        lambda i: rows[int(i)][column].convert("RGB"),
        stamp=lambda i: f"{rows._fingerprint} {i}",
    )
