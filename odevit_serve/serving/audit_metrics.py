"""The audit's numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from .audit import REJECTED, Audit


def audit_metrics(audit: Audit) -> Iterator[Metric]:
    """Evidence is an e-value: over replicas take its mean (`avg`), never a sum of the counts."""
    found = audit.describe()
    gauges = {
        "rejected": ("1 while the guarantee is rejected at level delta.", float(found["state"] == REJECTED)),
        "evidence": ("E-value against disagreement of at most epsilon; 1/delta rejects.", found["evidence"]),
        "rejects_at": ("Evidence that rejects: 1/delta.", found["rejects_at"]),
        "disagreement_low": (
            "Lower end of its confidence sequence, since the test began.",
            found["disagreement"]["low"],
        ),
        "disagreement_high": ("Upper end of the same.", found["disagreement"]["high"]),
        "epsilon": ("Disagreement that the guarantee allows.", found["epsilon"]),
        "coverage": ("Of the images drawn, how many were followed to full depth.", found["coverage"]),
        "waiting": ("Images that wait to be continued.", audit.waiting),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"odevit_audit_{name}", text, value)
    counters = {
        "drawn": ("Images drawn for the audit.", audit.drawn),
        "images": ("Images audited.", audit.audited),
        "differences": ("Audited images whose answer differs from full depth.", audit.differences),
        "violations": ("Times that the guarantee was rejected.", audit.violations),
        "unwritten": ("Audited images that could not be written to the file.", audit.unwritten),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(f"odevit_audit_{name}", text, value)
    dropped = CounterMetricFamily("odevit_audit_dropped", "Images drawn and not audited, by reason.", labels=["reason"])
    for reason, count in found["dropped"].items():
        dropped.add_metric([reason], count)
    yield dropped
