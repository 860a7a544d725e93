"""Figures that the pages quote are those of their sources: a bundle's config.json, or a file that a command wrote.

Each entry is a passage of a page in which every figure is replaced by where it comes from: `{source.key:format}`, or
`{source.key*factor:format}`. A source that changes fails here, and the failure shows the passage as it has to be.
"""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from odevit_serve import bundle
from odevit_serve.benchmark import serve_table
from odevit_serve.benchmark.table import as_markdown
from odevit_serve.cli.info import describe
from odevit_serve.train.presets import PRESETS

ROOT = Path(__file__).resolve().parents[1]
QUOTED = [
    # The README's tables, and its lines about the bundled models.
    ("README.md", "| top-1 / top-5 of {photos.metrics.test_images:,} test pictures, 284 classes | "
                  "{photos.metrics.test_accuracy:.1%} / {photos.metrics.test_accuracy_top5:.1%} | "
                  "{photos.metrics.test_accuracy_teacher:.1%} |"),
    ("README.md", "| top-1 / top-5 of {photos.metrics.full_size_images:,} full-size photographs | "
                  "{photos.metrics.full_size_accuracy:.1%} / {photos.metrics.full_size_accuracy_top5:.1%} | "
                  "{photos.metrics.full_size_accuracy_teacher:.1%} |"),
    ("README.md", "| parameters | {photos.costs.parameters.total*1e-6:.2f} M | "
                  "{photos.costs.teacher.parameters*1e-6:.1f} M |"),
    ("README.md", "| million multiply-adds: full depth / early exit at 1% and 95% | "
                  "{photos.costs.macs.total*1e-6:.0f} / {photos.costs.macs.adaptive*1e-6:.0f} | "
                  "{photos.costs.teacher.macs*1e-6:.0f} |"),
    ("README.md", "| mean depth with early exit | {photos.exit.calibration.mean_steps:.2f} of "
                  "{photos.integration.steps:d} steps | |"),
    ("README.md", "| top-1 at 1 / 2 / 3 / 8 / 18 steps | {photos.metrics.accuracy_by_steps.1:.1%} / "
                  "{photos.metrics.accuracy_by_steps.2:.1%} / {photos.metrics.accuracy_by_steps.3:.1%} / "
                  "{photos.metrics.accuracy_by_steps.8:.1%} / {photos.metrics.accuracy_by_steps.18:.1%} | |"),
    ("README.md", "| accuracy on the {cifar10.metrics.test_images:,} test images | "
                  "{cifar10.metrics.accuracy_by_steps.8:.1%} | {cifar10.metrics.test_accuracy_teacher:.1%} | "
                  "91.7 to 92.6% |"),
    ("README.md", "| parameters | {cifar10.costs.parameters.total*1e-6:.2f} M | "
                  "{cifar10.costs.teacher.parameters*1e-6:.1f} M | 0.27 M |"),
    ("README.md", "| million multiply-adds: full depth / early exit at {cifar10.exit.calibration.epsilon:.0%} "
                  "and 95% | {cifar10.costs.macs.total*1e-6:.0f} / {cifar10.costs.macs.adaptive*1e-6:.0f} | "
                  "{cifar10.costs.teacher.macs*1e-6:.0f} | 41 |"),
    ("README.md", "| mean depth with early exit | {cifar10.exit.calibration.mean_steps:.2f} of "
                  "{cifar10.integration.steps:d} steps | | |"),
    ("README.md", "By set it has {photos.metrics.test_accuracy_by_set.tiny:.1%} of Tiny-ImageNet's test "
                  "pictures (64 px), {photos.metrics.test_accuracy_by_set.mini:.1%} of mini-ImageNet's (84 px) "
                  "and {photos.metrics.test_accuracy_by_set.nette:.1%} of Imagenette's (160 px)."),
    ("README.md", "half the steps give {cifar10.metrics.accuracy_by_steps.4:.0%}"),
    ("README.md", "An ODE-ViT of {base-cifar10.costs.parameters.psi*1e-6:.0f} M parameters at "
                  "{base-cifar10.integration.steps:d} steps costs twice the multiply-adds of its "
                  "{base-cifar10.costs.teacher.parameters*1e-6:.0f} M teacher"),
    ("docs/benchmark.md", "{photos.metrics.test_accuracy:.1%} of the test pictures, the teacher's "
                          "{photos.metrics.test_accuracy_teacher:.1%}"),
    # What `calibrate` proved for the bundled model.
    ("docs/runtime.md", "tested on the other {cifar10.exit.calibration.images:,}: "
                        "{cifar10.exit.calibration.observed:.2%} differ at a mean depth of "
                        "{cifar10.exit.calibration.mean_steps:.2f} steps (bound at 95%: "
                        "{cifar10.exit.calibration.bound:.2%}). {cifar10.exit.calibration.exits.stopped early:.1%} of "
                        "the images ended by the rule, {cifar10.exit.calibration.exits.Lyapunov time:.1%}"),
    # tests/benchmarks/bench_runtime.py --output docs/runtime.json
    ("docs/runtime.md", "| {runtime.host_loop.1 threads.ratio:.2f}x the time "
                        "({runtime.host_loop.1 threads.runtime_ms:.1f} ms against "
                        "{runtime.host_loop.1 threads.unrolled_ms:.1f}) |"),
    ("docs/runtime.md", "**{runtime.host_loop.2 threads.ratio:.2f}x** ({runtime.host_loop.2 threads.runtime_ms:.1f} ms "
                        "against {runtime.host_loop.2 threads.unrolled_ms:.1f})"),
    ("docs/runtime.md", "| {runtime.adaptive.images_per_second.adaptive:.0f} against "
                        "{runtime.adaptive.images_per_second.full depth:.0f} images/s"),
    ("docs/runtime.md", "{runtime.adaptive.ratio:.2f}x by the median of neighbouring measurements"),
    ("docs/runtime.md", "| {runtime.adaptive.mean_steps:.2f} of {runtime.adaptive.full_steps:d} steps, so "
                        "{runtime.adaptive.promised_by_steps:.2f}x would be expected; "
                        "**{runtime.adaptive.of_promise:.2f} of it** "
                        "({runtime.adaptive.of_promise_quartiles.0:.2f} to "
                        "{runtime.adaptive.of_promise_quartiles.1:.2f}"),
    ("docs/runtime.md", "| {runtime.adaptive.promised_by_multiply_adds:.2f}x expected"),
    ("docs/runtime.md", "| {runtime.against_vit.model_images_per_second:.0f} against "
                        "{runtime.against_vit.vit_images_per_second:.0f} images/s: {runtime.against_vit.ratio:.1f}x"),
    ("docs/runtime.md", "| {runtime.cold.predict_seconds:.2f} s against {runtime.cold.import_torch_seconds:.2f} s: "
                        "{runtime.cold.ratio:.2f}x |"),
    ("docs/runtime.md", "| {runtime.cold.peak_megabytes:.0f} MB |"),
]  # fmt: skip


@cache
def source(name: str) -> Any:
    if name == "runtime":
        return json.loads((ROOT / "docs/runtime.json").read_text(encoding="utf-8"))
    config = bundle.read_config(bundle.find(name)) if name in bundle.bundled() else PRESETS[name]
    return {**dataclasses.asdict(config), "costs": describe(config)}


def figure(path: str) -> Any:
    name, *keys = path.split(".")
    value = source(name)
    for key in keys:
        value = value[int(key)] if isinstance(value, list | tuple) else value[key]
    return value


def filled(passage: str) -> str:
    """The passage with the figures of its sources."""

    def fill(found: re.Match[str]) -> str:
        path, factor, form = found.groups()
        value = figure(path)
        return format(value * float(factor) if factor else value, form)

    return re.sub(r"\{([^{}*:]+)(?:\*([\d.e-]+))?:([^{}]+)\}", fill, passage)


def words(text: str) -> str:
    """However lines are broken."""
    return " ".join(text.split())


@pytest.mark.parametrize(("page", "passage"), QUOTED)
def test_the_page_quotes_its_source(page: str, passage: str) -> None:
    assert "{" in passage
    assert words(filled(passage)) in words((ROOT / page).read_text(encoding="utf-8"))


def test_another_figure_would_be_noticed() -> None:
    for page, passage in QUOTED:
        changed = re.sub(r"\d", lambda digit: str((int(digit.group()) + 1) % 10), filled(passage))
        assert words(changed) not in words((ROOT / page).read_text(encoding="utf-8"))


def test_the_benchmark_page_has_the_table_of_its_file() -> None:
    """`odevit-serve benchmark --output docs/benchmark.json`."""
    page, result = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("benchmark.md", "benchmark.json"))
    assert words(as_markdown(json.loads(result))) in words(page)


def test_the_table_of_the_servers_is_that_of_its_file() -> None:
    """`odevit-serve benchmark serve ... -o docs/serving_bench.json --markdown FILE`."""
    result = json.loads((ROOT / "docs" / "serving_bench.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "serving_speed.md").read_text(encoding="utf-8")
    assert words(serve_table.as_markdown(result)) in words(page)
