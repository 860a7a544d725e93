"""uvicorn with connections that end, and a shutdown that finishes accepted requests within the grace it was given."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...errors import UserError
from ..engine import Engine
from ..repository import Repository
from .app import create_app
from .middleware import Options

log = logging.getLogger("odevit_serve.http")
MAX_HEAD = 64 * 1024  # bytes of the first line and the headers


class Connection(HttpToolsProtocol):
    """One connection. The head of a request, the client that reads the answer, and the pause before the next request
    each have `patience` seconds; uvicorn itself would wait for ever."""

    def __init__(self, *args: Any, patience: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.patience = patience
        self._for_head: asyncio.TimerHandle | None = None
        self._for_reader: asyncio.TimerHandle | None = None
        self._in_head, self._head_size = False, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._for_head, self._for_reader):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self._end(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_size = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._for_head is not None:
            self._for_head.cancel()
            self._for_head = None
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._expect_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._for_reader = self.loop.call_later(self.patience, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._for_reader is not None:
            self._for_reader.cancel()
            self._for_reader = None

    def _expect_head(self) -> None:
        if self._for_head is not None:
            self._for_head.cancel()
        self._for_head = self.loop.call_later(self.patience, self._end, b"408 Request Timeout")

    def _end(self, status: bytes) -> None:
        """Close; with a status if there is a request to answer, and by force if the client does not read it."""
        if self._in_head and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()
        self.loop.call_later(1.0, self.transport.abort)


class Server(uvicorn.Server):
    def __init__(self, app: FastAPI, grace: float, connections: int):
        options: Options = app.state.options
        config = uvicorn.Config(
            app,
            http=functools.partial(Connection, patience=options.header_timeout),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            limit_concurrency=connections,
            timeout_keep_alive=math.ceil(options.header_timeout) + 1,  # uvicorn's own comes after that of `Connection`
            timeout_graceful_shutdown=max(1, round(grace)),
            server_header=False,
            ws="none",
        )
        super().__init__(config)
        self.models: Repository = app.state.models
        self.doors, self.grace = app.state.doors, grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note the signal, and no more: it is not raised again, so a clean end has exit code 0."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("shutting down", extra={"fields": {"accepted": self.models.pending, "grace": self.grace}})
        self.models.stop_accepting()
        self.doors.close()
        # Those that are not done shortly before the end are failed with a reason while their clients still listen.
        end = threading.Thread(target=self.models.close, args=(max(0.0, 0.9 * self.grace - 0.2),), daemon=True)
        end.start()
        await super().shutdown(sockets)
        await asyncio.to_thread(end.join, 1.0)
        log.info("shut down", extra={"fields": {"unanswered": self.models.pending}})


def listen(host: str, port: int) -> socket.socket:
    """A socket on which clients wait until they are served, or one sentence about why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind((host, port))
        own.listen(2048)
    except OSError as error:
        own.close()
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror or error}): try another --port") from None
    return own


def run(
    engine: Engine | Repository,
    options: Options,
    host: str,
    port: int,
    grace: float,
    connections: int,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Listen until SIGTERM or SIGINT, then finish what was accepted."""
    # Steps and requests share one interpreter lock: hand it over sooner than after the usual 5 ms.
    sys.setswitchinterval(0.0005)
    own = listen(host, port)
    app, at = create_app(engine, options), own.getsockname()
    address = f"http://{'[' + at[0] + ']' if ':' in at[0] else at[0]}:{at[1]}"
    say(f"serving {', '.join(app.state.models.names)} on {address} (interface: {address}/openapi.json)")
    say(f"try: curl --data-binary @photo.jpg {address}/v1/predict")
    Server(app, grace, connections).run(sockets=[own])
