"""The dashboard and the alert rules name metrics and labels that exist; spans tell where the time of an image went."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from camera import shots
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

import odevit_serve
from odevit_serve.data.datasets import Images
from odevit_serve.guarantee.calibrate import calibrate
from odevit_serve.serving.audit import AuditOptions
from odevit_serve.serving.engine import Engine
from odevit_serve.serving.metrics import Metrics
from odevit_serve.serving.repository import Repository

FILES = Path(__file__).parents[2] / "docs" / "operations"


def dashboard() -> list[str]:
    board = json.loads((FILES / "grafana.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def alerts() -> list[str]:
    return [
        rule["expr"]
        for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]


def test_metrics_and_labels_exist(tiny_bundle: Path, tmp_path: Path) -> None:
    taken = shots(100, 0)
    images = Images([str(i) for i in range(100)], None, (), lambda i: Image.fromarray(taken[i]))
    calibrate(tiny_bundle, images, 0.05, 0.05, "travel", threads=1, output=tmp_path)
    engine = Engine(odevit_serve.load(tmp_path, threads=1), slots=2, audit=AuditOptions(0.5))
    engine.stats.failed["error"] += 1
    engine.stats.refused["queue full"] += 1
    metrics = Metrics(Repository.of(engine))
    metrics.count("/v1/predict", 200, 0.1)
    known: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            known.setdefault(sample.name, set()).update(sample.labels)
    expressions = [*dashboard(), *alerts()]
    assert len(expressions) > 20
    for expression in expressions:
        names = re.findall(r"odevit_\w+", expression)
        assert names, expression
        assert set(names) <= set(known), expression
        for name, matchers in re.findall(r"(odevit_\w+)\{(.*?)\}", expression):
            assert set(re.findall(r"(\w+)=", matchers)) <= known[name], expression
        for labels in re.findall(r"by \(([\w, ]+)\)", expression):  # `instance` is Prometheus' own
            assert set(labels.split(", ")) - {"instance"} <= set.union(*(known[name] for name in names)), expression
    used = {name for expression in alerts() for name in re.findall(r"odevit_\w+", expression)}
    assert {"odevit_queue_waiting", "odevit_images_failed_total", "odevit_http_requests_total"} <= used


def test_every_panel_has_a_place_of_its_own() -> None:
    board = json.loads((FILES / "grafana.json").read_text())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in board["panels"]}) == len(places)
