"""`/metrics` for Prometheus: the engine's own counts, read when asked, and a count and a histogram of requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..runtime.exits import REASONS
from .audit_metrics import audit_metrics
from .counters import SECONDS, Durations
from .repository import Repository, Served


class Metrics:
    """Of one application; several can live in one process."""

    def __init__(self, models: Repository):
        self.registry = CollectorRegistry()
        self.registry.register(_ModelCounts(models))
        self._requests = Counter(
            "odevit_http_requests", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "odevit_http_request_seconds",
            "From the first byte of a request to the last of its answer.",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )

    def count(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _ModelCounts(Collector):
    """The counts of every model, told apart by the label `model`."""

    def __init__(self, models: Repository):
        self.models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for served in self.models:
            for family in _EngineCounts(served).collect():
                own = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                own.samples += [s._replace(labels={"model": served.name, **s.labels}) for s in family.samples]
        yield from families.values()


class _EngineCounts:
    """The counts of one model, by all the engines that it has had."""

    def __init__(self, served: Served):
        self.served = served

    def collect(self) -> Iterator[Metric]:
        served, engine, stats = self.served, self.served.view, self.served.stats()
        yield _gauge("odevit_loaded", "1 when the model is in memory.", float(served.engine is not None))
        yield _counter("odevit_replaced", "Times that the model was loaded since the start.", served.replaced)
        yield _gauge("odevit_ready", "1 when requests are accepted.", float(engine.ready))
        yield _gauge("odevit_queue_waiting", "Places of the queue that are taken.", engine.waiting)
        yield _gauge("odevit_queue_capacity", "Places of the queue.", engine.queue)
        yield _gauge("odevit_slots_active", "Images in slots.", engine.active)
        yield _gauge("odevit_slots_capacity", "Slots for images.", engine.capacity)
        yield _counter("odevit_images_accepted", "Images accepted.", stats.accepted)
        yield _counter("odevit_images_answered", "Images answered.", stats.answered)
        yield _counter("odevit_images_cancelled", "Images whose client went away.", stats.cancelled)
        yield _counter("odevit_images_lowered", "Images whose depth overload has lowered.", stats.lowered)
        yield _by("odevit_images_refused", "Images not accepted, by reason.", dict(stats.refused))
        yield _by("odevit_images_failed", "Images accepted and failed, by reason.", dict(stats.failed))
        exits = {reason.short: stats.exits[reason] for reason in REASONS}
        yield _by("odevit_exits", "Images answered, by the reason they ended for.", exits)
        depths = dict(stats.depths)
        taken = sum(steps * count for steps, count in depths.items())
        yield _counter("odevit_steps", "Steps that answered images have taken.", taken)
        yield _counter("odevit_steps_saved", "Further steps that full depth would have taken.", stats.saved)
        full = engine.model.config.integration.steps
        yield _counts("odevit_depth_steps", "Steps an image has taken.", depths, range(1, full + 1))
        sizes = {rows: count for rows, count in enumerate(stats.batches) if rows}
        ends = sorted({min(2**n, engine.capacity) for n in range(12)})
        yield _counts("odevit_batch_size", "Images advanced by one step together.", sizes, ends)
        yield _durations("odevit_queue_seconds", "From acceptance to a slot, decoding included.", stats.queued)
        yield _durations("odevit_compute_seconds", "From a slot to the answer.", stats.computed)
        if engine.audit is not None:
            yield from audit_metrics(engine.audit)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value)


def _by(name: str, text: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["reason"])
    for reason, value in values.items():
        family.add_metric([reason], value)
    return family


def _counts(name: str, text: str, counts: Mapping[int, int], ends: Iterable[int]) -> Metric:
    buckets = [(str(end), float(sum(n for value, n in counts.items() if value <= end))) for end in ends]
    buckets.append(("+Inf", float(sum(counts.values()))))
    return HistogramMetricFamily(name, text, buckets, float(sum(value * n for value, n in counts.items())))


def _durations(name: str, text: str, durations: Durations) -> Metric:
    total, buckets = 0, []
    for end, count in zip([*map(str, SECONDS), "+Inf"], list(durations.counts)):
        total += count
        buckets.append((end, float(total)))
    return HistogramMetricFamily(name, text, buckets, durations.total)
