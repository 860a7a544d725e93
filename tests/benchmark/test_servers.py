"""Processes of the comparison: CPU time of a session, and a server that does not start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from odevit_serve.benchmark.servers import cpu_seconds, process
from odevit_serve.errors import UserError

BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counted by Linux alone")
def test_cpu_time_is_that_of_the_session_and_of_no_other() -> None:
    command = [sys.executable, "-c", BURN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as own:
        assert own.stdin is not None
        assert own.stdout is not None
        own.stdout.readline()
        assert cpu_seconds(own.pid) >= 0.3 - 2 / os.sysconf("SC_CLK_TCK")
        own.stdin.close()
    assert cpu_seconds(own.pid) == 0


def test_a_server_that_ends_at_once_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="continuous did not start"),
        process("continuous", tmp_path, tmp_path / "none.onnx", 1),
    ):
        pass
