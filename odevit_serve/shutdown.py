"""uvicorn with an end that keeps its word: accepted requests are finished, within the grace that was given."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from types import FrameType

import uvicorn
from fastapi import FastAPI

from .engine import Engine
from .errors import UserError

log = logging.getLogger("odevit_serve.http")


class Server(uvicorn.Server):
    def __init__(self, app: FastAPI, grace: float, connections: int):
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            limit_concurrency=connections,
            timeout_graceful_shutdown=max(1, round(grace)),
            server_header=False,
            ws="none",
        )
        super().__init__(config)
        self.engine: Engine = app.state.engine
        self.doors, self.grace = app.state.doors, grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note the signal, and no more: it is not raised again, so a clean end has exit code 0."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("shutting down", extra={"fields": {"accepted": self.engine.pending, "grace": self.grace}})
        self.engine.stop_accepting()
        self.doors.close()
        # Those that are not done shortly before the end are failed with a reason while their clients still listen.
        end = threading.Thread(target=self.engine.close, args=(max(0.0, 0.9 * self.grace - 0.2),), daemon=True)
        end.start()
        await super().shutdown(sockets)
        await asyncio.to_thread(end.join, 1.0)
        log.info("shut down", extra={"fields": {"unanswered": self.engine.pending}})


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, or one sentence about why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind((host, port))
    except OSError as error:
        own.close()
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror or error}): try another --port") from None
    return own
