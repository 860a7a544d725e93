"""`odevit-serve serve`: a model in memory, answering over HTTP."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import typer

from ..errors import UsageError
from . import app, require, say

if TYPE_CHECKING:
    from ..engine import Engine
    from ..gateway import Options


@app.command()
def serve(
    model: str = typer.Argument(None, metavar="[BUNDLE|FILE.onnx]", help="Default: the bundled model."),
    host: str = typer.Option("127.0.0.1", "--host", help="Address to listen on; 0.0.0.0 for all."),
    port: int = typer.Option(8000, "--port", min=0, max=65535),
    device: str = typer.Option("cpu", "--device", help="cpu, cuda, tensorrt or auto."),
    threads: int = typer.Option(None, "--threads", help="Threads of onnxruntime; default: one a core."),
    slots: int = typer.Option(32, "--slots", min=1, help="Images that advance together."),
    queue: int = typer.Option(256, "--queue", min=1, help="Images that may wait; more are refused with 429."),
    overload: str = typer.Option("refuse", "--overload", help="refuse, or depth: spend less of it as the queue grows."),
    rules: str = typer.Option(None, "--rules", help="Exit rules that requests may name, with commas; default: all."),
    min_kappa: float = typer.Option(0.0, "--min-kappa", min=0.0, help="Smallest kappa that requests may ask for."),
    max_kappa: float = typer.Option(None, "--max-kappa", min=0.0, help="Largest kappa that requests may ask for."),
    max_steps: int = typer.Option(None, "--max-steps", min=1, help="No request goes deeper."),
    max_body: float = typer.Option(16.0, "--max-body", min=0.001, help="Largest request, in MiB."),
    max_images: int = typer.Option(64, "--max-images", min=1, help="Most pictures in one request."),
    body_timeout: float = typer.Option(30.0, "--body-timeout", min=0.1, help="Seconds for a request to arrive."),
    connections: int = typer.Option(1024, "--connections", min=1, help="Connections at once; more get 503."),
    grace: float = typer.Option(30.0, "--grace", min=0.0, help="Seconds to finish in after SIGTERM."),
    api_key: str = typer.Option(
        None, "--api-key", envvar="ODEVIT_API_KEY", show_envvar=True, help="Ask this key of clients (better: by env)."
    ),
    cors: list[str] = typer.Option(
        [], "--cors", metavar="ORIGIN", help="Let pages of this origin call it; repeatable."
    ),
    log_format: str = typer.Option("auto", "--log", help="json, text, off, or auto: text at a terminal."),
    ray: bool = typer.Option(False, "--ray", help="Run on Ray Serve (extra `ray`)."),
    replicas: str = typer.Option("1", "--replicas", help="With --ray: a number, or MIN:MAX to scale by load."),
) -> None:
    """Serve a model over HTTP; images at different depths share one batch."""
    import dataclasses

    from ..bundle import find
    from ..engine import Engine, Limits
    from ..gateway import Options

    set_up_logging(log_format)
    limits = Limits(_names(rules), min_kappa, max_kappa, max_steps)
    if api_key is not None and not api_key.strip():
        raise UsageError("the API key is empty: leave it out to serve without one")
    options = Options(int(max_body * 2**20), max_images, body_timeout, api_key, tuple(cors))
    if ray:
        require("ray")
        from .. import ray as on_ray

        arguments = {
            "model": None if model is None else str(find(model)),
            "replicas": replicas,
            "slots": slots,
            "queue": queue,
            "overload": overload,
            "device": device,
            "threads": threads,
            "grace": grace,
            "limits": dataclasses.asdict(limits),
            "options": dataclasses.asdict(options),
        }
        on_ray.run(arguments, host, port, say)
        return
    from ..model import load

    engine = Engine(load(model, device, threads), slots=slots, queue=queue, overload=overload, limits=limits)
    run(engine, options, host, port, grace, connections)


def run(engine: Engine, options: Options, host: str, port: int, grace: float, connections: int) -> None:
    """Listen until SIGTERM or SIGINT, then finish what was accepted."""
    from ..server import create_app
    from ..shutdown import Server, listen

    # Steps and requests share one interpreter lock: hand it over sooner than after the usual 5 ms.
    sys.setswitchinterval(0.0005)
    socket = listen(host, port)
    name, at = engine.model.config.name, socket.getsockname()
    address = f"http://{'[' + at[0] + ']' if ':' in at[0] else at[0]}:{at[1]}"
    say(f"serving {name} on {address} (documentation: {address}/docs)")
    say(f"try: curl --data-binary @photo.jpg {address}/v1/predict")
    Server(create_app(engine, options), grace, connections).run(sockets=[socket])


def set_up_logging(form: str) -> None:
    """Log lines to stderr, as JSON or text; ours and uvicorn's alike."""
    from ..gateway import JsonLines, TextLines

    if form not in ("auto", "json", "text", "off"):
        raise UsageError(f"unknown log format {form!r}: choose one of auto, json, text, off")
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler: logging.Handler = logging.NullHandler() if form == "off" else logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name in ("odevit_serve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.CRITICAL + 1 if form == "off" else logging.INFO)


def _names(rules: str | None) -> tuple[str, ...] | None:
    from .. import exits

    if rules is None:
        return None
    names = tuple(name.strip() for name in rules.split(",") if name.strip())
    for name in names:
        exits.find(name)
    return names
