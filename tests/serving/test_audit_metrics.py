"""The audit in Prometheus' form says what its description says."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from servers import nothing_left, until

import odevit_serve
from odevit_serve import bundle
from odevit_serve.config import Calibration
from odevit_serve.runtime.model import load_bundle
from odevit_serve.serving.audit import AuditOptions
from odevit_serve.serving.audit_metrics import audit_metrics
from odevit_serve.serving.engine import Engine

PICTURES = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
OF_ALL = ("evidence", "rejects_at", "epsilon", "coverage")


@pytest.fixture
def engine(tiny_bundle: Path, tmp_path: Path) -> Iterator[Engine]:
    """A claim that cannot be true: every image ends at its first step, and one in a hundred may differ."""
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "proud"))
    config, setting = bundle.read_config(folder), load_bundle(folder).graphs.setting
    proof = Calibration(0.01, 0.05, 500, "", setting)
    bundle.write_config(folder, config.replace(exit=replace(config.exit, threshold=0.0, calibration=proof)))
    with Engine(odevit_serve.load(folder, threads=1), slots=4, audit=AuditOptions(1.0, seed=0)) as own:
        yield own


def samples(engine: Engine) -> dict[str, float]:
    assert engine.audit is not None
    found = {}
    for family in audit_metrics(engine.audit):
        assert family.documentation.endswith((".", "reason."))
        for sample in family.samples:
            assert sample.name.startswith("odevit_audit_")
            found[sample.name.removeprefix("odevit_audit_") + "".join(sample.labels.values())] = sample.value
    return found


def test_what_is_measured_is_what_is_described(engine: Engine) -> None:
    audit = engine.audit
    assert audit is not None
    before = samples(engine)
    assert (before["rejected"], before["drawn_total"], before["coverage"]) == (0, 0, 1)
    for future in engine.submit_many(PICTURES):
        future.result(20)
    until(lambda: not audit.pending)
    audit.dropped["line full"] += 3  # as when too many wait
    audit.unwritten = 2
    found, described = samples(engine), audit.describe()
    assert described["state"] == "rejected"
    assert found["rejected"] == 1
    for name in OF_ALL:
        assert found[name] == described[name]
    assert found["evidence"] >= found["rejects_at"] == 20
    low, high = described["disagreement"].values()
    assert (found["disagreement_low"], found["disagreement_high"]) == (low, high)
    assert 0.01 < low <= high
    assert (found["drawn_total"], found["images_total"]) == (described["drawn"], described["audited"])
    assert found["differences_total"] == audit.differences > 1
    assert (found["violations_total"], found["unwritten_total"], found["waiting"]) == (1, 2, 0)
    assert found["dropped_totalline full"] == 3
    assert found["coverage"] == audit.audited / (audit.audited + 3)
    nothing_left(engine)


def test_images_that_wait_are_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = engine.audit
    assert audit is not None
    monkeypatch.setattr(audit, "resume", lambda core: None)  # nothing is continued
    engine.submit(PICTURES[0]).result(20)
    assert samples(engine)["waiting"] == 1
    assert samples(engine)["images_total"] == 0
    monkeypatch.undo()
    engine.submit(PICTURES[1]).result(20)
    until(lambda: samples(engine)["images_total"] == 2)
