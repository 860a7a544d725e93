"""Past one machine: a Ray Serve deployment whose replicas each run the engine behind the same HTTP interface.

    serve run odevit_serve.serving.ray:app model=cifar10 replicas=1:4

A replica is sent at most `2 * slots` requests at once: as many as advance together, and as many again decoded and
ready for the slots that become free. What comes on top waits in Ray, up to `queued`, and then gets 503.

Every replica serves all models. With `watch` it replaces one whose files have changed, as a server without Ray does.
Another `revision`, or any other change of the arguments, has Ray replace the replicas, some after the others.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve import Application

from ..bundle import DEFAULT
from ..errors import UsageError, UserError
from ..schema import build

if TYPE_CHECKING:
    from .audit import AuditOptions
    from .repository import Repository


@dataclass(frozen=True)
class Arguments:
    """What `app` takes; from a `serve` YAML or the command line as text."""

    model: str | None = None
    models: tuple[str, ...] = ()  # several, each `SOURCE` or `NAME=SOURCE`, in place of `model`
    replicas: str = "1"  # a number, or MIN:MAX to scale by load
    slots: int = 32
    queue: int = 256  # of images in each replica
    queued: int = 1024  # requests that wait in Ray when every replica has its fill
    overload: str = "refuse"
    device: str = "cpu"
    threads: int | None = None  # of onnxruntime in each replica; default: the CPUs that Ray gives it
    cpus: float = 1.0
    gpus: float = 0.0
    grace: float = 30.0
    trust: bool = False
    watch: bool = False  # replace models whose files have changed
    revision: int = 0  # another one has Ray replace the replicas
    name: str = "odevit-serve"
    limits: dict[str, Any] = field(default_factory=dict)  # of `engine.Limits`
    audit: dict[str, Any] | None = None  # of `audit.AuditOptions`; each replica tests its own stream
    options: dict[str, Any] = field(
        default_factory=dict
    )  # of `middleware.Options`; the key of ODEVIT_API_KEY unless it has one

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Arguments:
        """Numbers may come as text, as `serve run` hands them over."""
        kinds = {
            "slots": int,
            "queue": int,
            "queued": int,
            "threads": int,
            "cpus": float,
            "gpus": float,
            "grace": float,
            "revision": int,
        }
        if given.get("model") and given.get("models"):
            raise UsageError("give model or models, not both")
        given = {**given, **{key: str(given.get(key, False)).lower() == "true" for key in ("trust", "watch")}}
        if isinstance(given.get("models"), str):
            given["models"] = [source.strip() for source in given["models"].split(",")]
        try:
            numbers = {key: kinds[key](value) for key, value in given.items() if key in kinds and value is not None}
        except ValueError as error:
            raise UsageError(f"an argument is no number: {error}") from None
        options = {"api_key": os.environ.get("ODEVIT_API_KEY"), **given.get("options", {})}
        return build(  # type: ignore[no-any-return]
            cls,
            {**given, **numbers, "options": options, "replicas": str(given.get("replicas", cls.replicas))},
        )

    @property
    def sources(self) -> tuple[str, ...]:
        """What each replica serves."""
        return self.models or (self.model or DEFAULT,)


def _server_options(arguments: Arguments) -> Any:
    from .http.middleware import Options

    return build(Options, arguments.options, "options")


def _audit_options(arguments: Arguments, replica: str = "") -> Any:
    """The audit of one replica; its recordings go to a file of its own, beside those of the others."""
    from .audit import AuditOptions

    if arguments.audit is None:
        return None
    file = arguments.audit.get("file")
    if file is not None and (len(arguments.sources) > 1 or arguments.watch):
        raise UsageError("the file of an audit records one model: leave it out for several models and with watch")
    given = {**arguments.audit, "file": None if file is None else f"{file}.{replica}"}
    return build(AuditOptions, given, "audit")


_built: list[Any] = []  # the application of this replica: Ray makes the deployment first and asks for it then


def _application() -> Any:
    return _built[-1]


@serve.ingress(_application)
class Replica:
    """One process with an engine for each model. Ray counts it ready when the constructor returns: after warm-up."""

    def __init__(self, arguments: Arguments):
        from .http.app import create_app
        from .logs import set_up_logging

        set_up_logging("json")
        name = f"{serve.get_replica_context().replica_id.unique_id}"
        self.models = _open(arguments, _audit_options(arguments, name))
        self.models.look_after(arguments.watch, None)
        app = create_app(self.models, _server_options(arguments))
        app.add_middleware(_Signed, name=name)
        _built.append(app)

    def check_health(self) -> None:
        """Ray asks every few seconds and replaces a replica that raises."""
        if not (self.models.ready or self.models.state == "draining"):
            raise RuntimeError(f"the engine is {self.models.state}")


def _open(arguments: Arguments, audit: AuditOptions | None) -> Repository:
    """The models of a replica, warmed up."""
    from .engine import Limits
    from .repository import Repository, loader

    limits = build(Limits, arguments.limits, "limits")
    settings: dict[str, Any] = {"queue": arguments.queue, "overload": arguments.overload, "limits": limits}
    threads = arguments.threads or max(1, int(arguments.cpus))
    load = loader(arguments.device, threads, arguments.trust, slots=arguments.slots, audit=audit, **settings)
    models = Repository(load).open(arguments.sources)
    for served in models:
        served.current().start()
    return models


class _Signed:
    """Says in each answer which replica made it."""

    def __init__(self, app: Any, name: str):
        self.app, self.name = app, name.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sign(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (b"x-replica", self.name)]}
            await send(message)

        await self.app(scope, receive, sign)


def scaling(replicas: str, slots: int) -> dict[str, Any]:
    """Ray's options for `2` or `1:4`."""
    low, colon, high = replicas.partition(":")
    if not low.isdigit() or int(low) < 1 or (colon and (not high.isdigit() or int(high) < int(low))):
        raise UsageError(f"replicas must be a number, or MIN:MAX, not {replicas!r}")
    if not colon:
        return {"num_replicas": int(low)}
    target = {"min_replicas": int(low), "max_replicas": int(high), "target_ongoing_requests": slots}
    return {"autoscaling_config": target}


def app(args: dict[str, Any]) -> Application:
    """The application for `serve run` and `serve deploy`; the arguments are those of `Arguments`."""
    arguments = Arguments.parse(dict(args))
    _server_options(arguments)  # what is wrong with them is told here, not by a replica that does not start
    _audit_options(arguments)
    replica: Any = serve.deployment(
        Replica,
        name=arguments.name,
        max_ongoing_requests=2 * arguments.slots,
        max_queued_requests=arguments.queued,
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=arguments.grace,
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        **scaling(arguments.replicas, arguments.slots),
    )
    return replica.bind(arguments)  # type: ignore[no-any-return]


def _try(arguments: Arguments) -> None:
    """Raises what keeps a replica from serving; on the CPU, as this process need not have another device."""
    audit = None if arguments.audit is None else {**arguments.audit, "file": None}
    arguments = dataclasses.replace(arguments, device="cpu", audit=audit)
    _open(arguments, _audit_options(arguments)).close(0.0)


def run(arguments: dict[str, Any], host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve on the cluster that RAY_ADDRESS names, or on one of this machine alone, until SIGTERM or SIGINT.

    SIGHUP has Ray replace the replicas, some after the others; each finishes what it has. The new ones load the files
    as they are then. They are tried here first: what cannot be served is told, and changes nothing.
    """
    import signal
    import threading

    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ended, asked = threading.Event(), threading.Event()
    name, revision = arguments.get("name", Arguments.name), 0
    target = app(arguments)
    ray.init(
        address=os.environ.get("RAY_ADDRESS"),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, lambda *_: ended.set())
    if hasattr(signal, "SIGHUP"):  # not on Windows
        signal.signal(signal.SIGHUP, lambda *_: asked.set())
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(target, name=name, route_prefix="/")
        say(f"serving on http://{host}:{port} by Ray, {arguments.get('replicas', '1')} replicas")
        while not ended.wait(1.0):
            if not asked.is_set():
                continue
            asked.clear()
            revision += 1
            try:
                _try(Arguments.parse(arguments))
                serve.run(app({**arguments, "revision": revision}), name=name, route_prefix="/")
                say(f"replaced: revision {revision}")
            except (UserError, RuntimeError) as error:  # Ray's own for replicas that do not start: others go on
                say(f"not replaced: {error}")
    finally:
        serve.shutdown()
        ray.shutdown()
