"""What classes are called: by the folders of a data set, by WordNet, and to people."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UsageError

WORDNET = re.compile(r"n\d{8}")


def class_rows(classes: Sequence[str], outputs: int) -> list[int]:
    """Rows of an ImageNet head for class names (`French_horn`, `n03394916`, or a number)."""
    words = _words() if outputs == 1000 else {}
    rows = []
    for name in classes:
        row = int(name) if name.isdigit() else words.get(_plain(name), -1)
        if not 0 <= row < outputs:
            raise UsageError(
                f"the teacher's head of {outputs} classes has none called {name!r}: fit one with --teacher-head probe"
            )
        rows.append(row)
    return rows


def wordnet_id(name: str) -> str:
    """The WordNet id of a class of ImageNet, by its id or one of its names."""
    if WORDNET.fullmatch(name):
        return name
    row = _words().get(_plain(name))
    if row is None:
        raise UsageError(f"{name!r} is neither a WordNet id nor a name of one of ImageNet's 1,000 classes")
    found: str = _imagenet().index_to_label_name(row)
    return found


def shown_names(classes: Sequence[str], chosen: Mapping[str, str]) -> tuple[str, ...]:
    """One name a class for people to read: as `chosen`, else WordNet's first word for its ids, else as it is.

    Where two classes would have the same name, both keep the one they have in the data.
    """
    unknown = sorted(set(chosen) - set(classes))
    if unknown:
        raise UsageError(f"data.names has {unknown[0]!r}, which is no class of the data")
    lemmas: Mapping[str, str] = {}
    if any(map(WORDNET.fullmatch, classes)) and importlib.util.find_spec("timm"):
        known = _imagenet()
        lemmas = {known.index_to_label_name(row): known.index_to_description(row).split(",")[0] for row in range(1000)}
    names = [chosen.get(name, lemmas.get(name, name)) for name in classes]
    often = Counter(names)
    names = [folder if often[name] > 1 else name for name, folder in zip(names, classes)]
    return tuple(names if len(set(names)) == len(names) else classes)


@functools.cache
def _words() -> dict[str, int]:
    """Row of ImageNet's 1,000 by every id and name."""
    words: dict[str, int] = {}
    known = _imagenet()
    for row in range(1000):
        for name in [known.index_to_label_name(row), *known.index_to_description(row).split(",")]:
            words.setdefault(_plain(name), row)
    return words


@functools.cache
def _imagenet() -> Any:
    from timm.data import ImageNetInfo

    return ImageNetInfo("imagenet-1k")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()
