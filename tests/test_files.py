"""Files that matter are on the disk before they replace others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from odevit_serve import bundle
from odevit_serve.config import Config
from odevit_serve.errors import UserError
from odevit_serve.files import atomic, clear


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced and replaced, in this order."""
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        sync(handle)

    def swap(source: Path, target: Path) -> None:
        done.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", swap)
    return done


def test_content_and_name_are_synced_around_the_replacement(tmp_path: Path, done: list[str]) -> None:
    bundle.write_config(tmp_path, Config())
    first, *rest = done[:3]
    assert first.startswith("sync .config.json.")
    assert rest == ["replace", f"sync {tmp_path.name}"]
    assert bundle.read_config(tmp_path) == Config()


def test_what_an_export_makes_is_on_the_disk_before_it_replaces_anything(tmp_path: Path, done: list[str]) -> None:
    from odevit_serve.export.install import move

    scratch, target = tmp_path / "scratch", tmp_path / "model.onnx"
    (scratch / "engines").mkdir(parents=True)
    (scratch / "made.onnx").write_bytes(b"new")
    target.write_bytes(b"old")
    move(scratch / "made.onnx", target, scratch)
    assert done == ["sync made.onnx", "replace", f"sync {tmp_path.name}"]
    assert target.read_bytes() == b"new"
    done.clear()
    (scratch / "engines" / "step.engine").write_bytes(b"new")
    move(scratch / "engines", tmp_path / "engines", scratch)
    assert done == ["sync step.engine", "sync engines", "replace", f"sync {tmp_path.name}"]


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "stage-1").mkdir()
    writing = atomic(tmp_path / "stage-1" / "last.pt")
    writing.__enter__()  # and killed
    for name in (".hidden", "last.pt", "a.part"):
        (tmp_path / name).write_bytes(b"x")
    assert len(list((tmp_path / "stage-1").iterdir())) == 1
    clear(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".hidden", "a.part", "last.pt", "stage-1"]


FILL = """
import resource, signal, sys
from pathlib import Path
from odevit_serve.files import atomic
from odevit_serve.errors import UserError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with atomic(Path(sys.argv[1])) as path:
        path.write_bytes(b"x" * 100_000)
except UserError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "weights"
    target.write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", FILL, str(target)], capture_output=True, text=True)
    assert "could not be written, an existing one is unchanged" in done.stdout
    assert done.stdout.count("\n") == 1
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["weights"]


def test_what_the_disk_refuses_at_the_last_moment_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems that allocate late tell of a full disk only when the content is synced."""
    import errno

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = tmp_path / "weights"
    target.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"), atomic(target) as path:
        path.write_bytes(b"new")
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["weights"]
