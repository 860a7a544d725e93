"""A training run of seconds, by the command as a user types it."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

from accelerate.state import AcceleratorState

from odevit_serve import cli

SMALL = [
    "--set", "data.augment='none'", "--batch-size", "16", "--lr", "0.003", "--set", "training.schedule='onecycle'",
    "--set", "architecture.image_size=16", "--set", "architecture.patch_size=4", "--set", "architecture.width=64",
    "--set", "architecture.heads=1", "--set", "architecture.mlp_ratio=1.0", "--set", "architecture.registers=1",
    "--set", "integration.steps=4", "--set", "integration.horizon=4.0",
]  # fmt: skip


def command(*words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """The command as a user types it, in this process: importing torch anew for each would take most of the time."""
    out, err, code, argv = io.StringIO(), io.StringIO(), 0, sys.argv
    sys.argv = ["odevit-serve", *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = argv
        AcceleratorState._reset_state(True)  # one a process: a user's next command would have its own
    if check:
        assert code == 0, err.getvalue()
    return subprocess.CompletedProcess(list(words), code, out.getvalue(), err.getvalue())
