"""The servers of `benchmark serve`: each a process of its own, and the CPU time that it takes."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import bundle
from ..errors import UserError
from . import cnn

BY_LITSERVE = ("litserve", "cnn")
AUDIT = 0.02  # of the answers
SLOTS = 32


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def process(
    system: str, model: Path, unrolled: Path, threads: int, more: Sequence[str] = ()
) -> Iterator[tuple[str, int]]:
    """A server of one of the systems, ready; gives its address and its session."""
    port = free_port()
    source = unrolled if system in ("fixed", *BY_LITSERVE) else model
    if system == "cnn":
        source = cnn.write(unrolled.with_name("cnn.onnx"), bundle.read_config(model))
    if system in ("continuous", "audited", "fixed"):
        options = ["--slots", str(SLOTS), "--queue", "1024", "--log", "off", "--threads", str(threads)]
        options += ["--audit", str(AUDIT)] if system == "audited" else []
        command = [sys.executable, "-m", "odevit_serve", "serve", str(source), "--port", str(port), *options, *more]
    else:
        module = "odevit_serve.benchmark.litserve" if system in BY_LITSERVE else "odevit_serve.benchmark.synchronous"
        command = [sys.executable, "-m", module, str(source), str(port), str(threads)]
    own = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(own, f"{address}/{'health' if system in BY_LITSERVE else 'v2/health/ready'}", system)
        yield address, own.pid
    finally:
        own.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            own.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(own.pid, signal.SIGKILL)  # with whatever it started itself
        own.wait()


def _wait(own: subprocess.Popen[bytes], address: str, system: str) -> None:
    limit = time.monotonic() + 60
    while time.monotonic() < limit and own.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            if urllib.request.urlopen(address, timeout=1).status == 200:
                return
        time.sleep(0.1)
    raise UserError(f"{system} did not start")


def cpu_seconds(session: int) -> float:
    """CPU time so far of all processes of a session, as Linux counts it; NaN elsewhere."""
    if not sys.platform.startswith("linux"):
        return math.nan
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # those that have ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")
