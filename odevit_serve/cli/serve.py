"""`odevit-serve serve`: a model in memory, answering over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from ..errors import UsageError
from . import TRUST, app, require, say


@app.command()
def serve(
    models: list[str] = typer.Argument(
        None,
        metavar="[[NAME=]BUNDLE|FILE.onnx]...",
        help="The first answers /v1/predict, each /v1/models/NAME/predict. Default: the bundled model.",
    ),
    host: str = typer.Option("127.0.0.1", "--host", help="Address to listen on; 0.0.0.0 for all."),
    port: int = typer.Option(8000, "--port", min=0, max=65535),
    grpc_port: int = typer.Option(
        None, "--grpc-port", min=0, max=65535, help="Also listen here for the Open Inference Protocol over gRPC."
    ),
    device: str = typer.Option("cpu", "--device", help="cpu, cuda, tensorrt or auto."),
    threads: int = typer.Option(None, "--threads", help="Threads of onnxruntime; default: one per core."),
    trust: bool = TRUST,
    slots: int = typer.Option(32, "--slots", min=1, help="Images that advance together."),
    queue: int = typer.Option(256, "--queue", min=1, help="Images that may wait; more are refused with 429."),
    overload: str = typer.Option("refuse", "--overload", help="refuse, or depth: lower it as the queue fills."),
    rules: str = typer.Option(None, "--rules", help="Exit rules that requests may name, with commas; default: all."),
    min_threshold: float = typer.Option(None, "--min-threshold", help="Smallest threshold that requests may ask for."),
    max_threshold: float = typer.Option(None, "--max-threshold", help="Largest threshold that requests may ask for."),
    max_steps: int = typer.Option(None, "--max-steps", min=1, help="Most steps of any request."),
    max_body: float = typer.Option(16.0, "--max-body", min=0.001, help="Largest request, in MiB."),
    max_images: int = typer.Option(64, "--max-images", min=1, help="Most pictures in one request."),
    max_pixels: float = typer.Option(
        16.0, "--max-pixels", min=0.001, help="Largest picture, in megapixels as decoded; JPEG may be reduced to it."
    ),
    header_timeout: float = typer.Option(
        10.0, "--header-timeout", min=0.1, help="Seconds for the head of a request, and for a pause between two."
    ),
    body_timeout: float = typer.Option(30.0, "--body-timeout", min=0.1, help="Seconds for a request body to arrive."),
    connections: int = typer.Option(1024, "--connections", min=1, help="Connections at once; more get 503."),
    repository: Path = typer.Option(
        None, "--repository", metavar="DIR", help="Let clients with the key load, replace and unload bundles of DIR."
    ),
    watch: bool = typer.Option(False, "--watch", help="Replace a model when its files have changed."),
    idle: float = typer.Option(
        None, "--idle", min=0.1, help="Seconds without a request after which a model is removed from memory."
    ),
    grace: float = typer.Option(30.0, "--grace", min=0.0, help="Seconds to finish accepted requests after SIGTERM."),
    api_key: str = typer.Option(
        None, "--api-key", envvar="ODEVIT_API_KEY", show_envvar=True, help="Key that clients must send."
    ),
    cors: list[str] = typer.Option(
        [], "--cors", metavar="ORIGIN", help="Let pages of this origin call it; repeatable."
    ),
    log_format: str = typer.Option("auto", "--log", help="json, text, off, or auto: text at a terminal."),
    audit: float = typer.Option(
        None, "--audit", metavar="RATE", help="Fraction of guaranteed answers to follow to full depth, such as 0.02."
    ),
    on_violation: str = typer.Option(
        "warn",
        "--on-violation",
        help="When an audit rejects the guarantee: warn, tighten the threshold, or full depth.",
    ),
    audit_file: str = typer.Option(
        None,
        "--audit-file",
        metavar="FILE",
        help="Keep scores and answers of audited images, for calibrate --from-audit.",
    ),
    ray: bool = typer.Option(False, "--ray", help="Run on Ray Serve (extra `ray`)."),
    replicas: str = typer.Option("1", "--replicas", help="With --ray: a number, or MIN:MAX to scale by load."),
) -> None:
    """Serve models over HTTP; images at different depths share one batch."""
    import dataclasses

    from ..serving.audit import AuditOptions
    from ..serving.engine import Limits
    from ..serving.http.middleware import Options
    from ..serving.logs import set_up_logging

    set_up_logging(log_format)
    limits = Limits(_names(rules), min_threshold, max_threshold, max_steps, int(max_pixels * 1e6))
    if grpc_port is not None:
        require("grpc")
    grpc = None if grpc_port is None else f"{'[' + host + ']' if ':' in host else host}:{grpc_port}"
    options = Options(int(max_body * 2**20), max_images, body_timeout, api_key, tuple(cors), header_timeout, grpc)
    audits = None if audit is None else AuditOptions(audit, on_violation, audit_file)
    if audit_file is not None and (len(models or []) > 1 or repository or watch):
        raise UsageError("--audit-file records one model: it cannot be used with several, --repository or --watch")
    from ..bundle import DEFAULT

    if ray:
        require("ray")
        if repository or idle or grpc:
            raise UsageError("--ray cannot be used with --repository, --idle and --grpc-port: see docs/serving.md")
        from ..bundle import find
        from ..serving import ray as on_ray
        from ..serving.repository import parse

        named = [parse(given) for given in models or [DEFAULT]]
        arguments = {
            "models": tuple(f"{name}={find(source)}" if name else str(find(source)) for name, source in named),
            "replicas": replicas,
            "slots": slots,
            "queue": queue,
            "overload": overload,
            "device": device,
            "threads": threads,
            "grace": grace,
            "trust": trust,
            "watch": watch,
            "limits": dataclasses.asdict(limits),
            "options": dataclasses.asdict(options),
            "audit": None if audits is None else dataclasses.asdict(audits),
        }
        on_ray.run(arguments, host, port, say)
        return
    from ..serving.http.uvicorn_server import run
    from ..serving.repository import Repository, loader

    settings: dict[str, Any] = {"queue": queue, "overload": overload, "limits": limits, "audit": audits}
    load = loader(device, threads, trust, slots=slots, **settings)
    served = Repository(load, repository).open(models or [DEFAULT])
    served.look_after(watch, idle)
    run(served, options, host, port, grace, connections, say)


def _names(rules: str | None) -> tuple[str, ...] | None:
    from ..runtime import exits

    if rules is None:
        return None
    names = tuple(name.strip() for name in rules.split(",") if name.strip())
    for name in names:
        exits.find(name)
    return names
