"""Bundles on the Hugging Face Hub: pushing one, and getting one at a pinned revision with its digests checked.

A pushed bundle carries `SHA256SUMS`, in the format of the command `sha256sum`, so that files of different models, or
files that were damaged on the way, are noticed before anything is computed with them.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import MissingExtra, UsageError, UserError

SUMS = "SHA256SUMS"
PREFIX = "hf:"
# Plots and checkpoints that lie beside a bundle are not part of it.
FILES = ("config.json", "preprocessor_config.json", "model.safetensors", "*.onnx", "README.md", "*.py")


def split(name: str) -> tuple[str, str | None]:
    """Repository and revision of `[hf:]NAME[@REVISION]`."""
    repository, at, revision = name.removeprefix(PREFIX).partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository) or (at and not revision):
        raise UsageError(f"{name!r} is not a Hub name: write {PREFIX}OWNER/MODEL or {PREFIX}OWNER/MODEL@REVISION")
    return repository, revision or None


def find(name: str) -> Path:
    """The folder of a bundle on the Hub, downloaded if need be; its files are those that its digests were made of."""
    repository, revision = split(name)
    with _told(name):
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=[*FILES, SUMS]))
    check(folder, name)
    return folder


def check(folder: Path, name: str) -> None:
    """Compare each file with its digest in `SHA256SUMS`."""
    path = folder / SUMS
    if not path.is_file():
        warnings.warn(f"{name} has no {SUMS}: its files were not checked", RuntimeWarning, stacklevel=3)
        return
    expected = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        digest, _, file = line.partition("  ")
        expected[file] = digest
    for file in sorted(set(expected) | {file.name for file in members(folder)}):
        if not (folder / file).is_file():
            raise UserError(f"{name} is incomplete: {file} is in {SUMS} but not in the repository")
        if file not in expected:
            raise UserError(f"{name}: {file} is not in {SUMS}, so it is not part of the bundle that was pushed")
        if sha256(folder / file) != expected[file]:
            raise UserError(f"{name}: {file} is not the file that was pushed (its SHA-256 differs from {SUMS})")


def members(folder: Path) -> list[Path]:
    """The files of a bundle, in order of their names."""
    return sorted({path for pattern in FILES for path in folder.glob(pattern) if path.is_file()})


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def push(folder: Path, name: str, private: bool = False, message: str = "") -> str:
    """Upload a bundle with its digests; gives `hf:NAME@COMMIT`, the name by which exactly this one is found again."""
    repository, revision = split(name)
    if revision is not None:
        raise UsageError(f"{name!r} names a revision: a push makes a new one, so give {PREFIX}{repository}")
    files = members(folder)
    with tempfile.TemporaryDirectory() as scratch:
        sums = Path(scratch) / SUMS
        sums.write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files), encoding="utf-8")
        with _told(name):
            from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

            api = HfApi()
            api.create_repo(repository, private=private, exist_ok=True)
            known = set(api.list_repo_files(repository))
            operations: list[Any] = [CommitOperationAdd(path.name, str(path)) for path in [*files, sums]]
            gone = {path for path in known if "/" not in path and _belongs(path)} - {path.name for path in files}
            operations += [CommitOperationDelete(path) for path in sorted(gone)]
            commit = api.create_commit(
                repository, operations, commit_message=message or f"odevit-serve push {folder.name}"
            )
    return f"{PREFIX}{repository}@{commit.oid}"


def _belongs(name: str) -> bool:
    return any(Path(name).match(pattern) for pattern in FILES)


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Failures of the Hub as one sentence; progress only where somebody watches."""
    try:
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        yield
    except ImportError:
        raise MissingExtra("hub") from None
    except UserError:
        raise
    except Exception as error:  # the library's failures have no common base class
        kind, text = type(error).__name__, str(error).strip().splitlines()
        repository, revision = split(name)
        if kind == "RevisionNotFoundError":
            raise UserError(f"{repository} on the Hub has no revision {revision!r}") from None
        if kind in ("RepositoryNotFoundError", "GatedRepoError"):
            raise UserError(
                f"the Hub has no model {repository!r}, or you may not read it (try: hf auth login)"
            ) from None
        said = " ".join(" ".join(text).split())[:300] or kind
        raise UserError(f"the Hub could not be used for {repository!r}: {said}") from None
