"""A port for a server that is told its number: below those that the system gives to others by itself."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, EACH = 20_000, 1_000  # Linux hands out 32768 to 60999
_NUMBERS = itertools.count()


def own_port() -> int:
    """Free now, and of this worker of pytest-xdist alone, so that nobody takes it before the server does."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
    for number in _NUMBERS:
        port = FIRST + EACH * worker + number % EACH
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable: the numbers do not end")
