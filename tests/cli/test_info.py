"""`info`: the facts of a preset, a bundle and a file are those of its configuration."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from odevit_serve import cli, costs
from odevit_serve.bundle import DEFAULT, MODELS, bundled, read_config, write_config
from odevit_serve.cli.info import describe
from odevit_serve.config import Architecture, Calibration, Config, ExitPolicy, Integration, TeacherFacts
from odevit_serve.train.presets import PRESETS


def said(*words: object) -> str:
    done = CliRunner().invoke(cli.app, ["info", *map(str, words)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


def facts(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*words, "--json"))
    return found


def test_info_counts_parameters_and_macs_beside_the_teachers() -> None:
    found = facts("base-cifar10")
    assert found["parameters"]["psi"] == 7_088_640
    assert found["teacher"]["parameters"] == 85_806_346
    assert found["macs"]["total"] / found["teacher"]["macs"] == pytest.approx(2.1, abs=0.01)
    shown = said("tiny")
    assert "450,816" in shown
    assert "365,107,584" in shown


def test_info_lists_presets_and_models() -> None:
    listing = facts("--list")
    assert listing["bundled"] == bundled()
    assert listing["presets"] == list(PRESETS)
    assert f"bundled: {', '.join(bundled())}" in said("--list")


def test_a_bundle_and_its_files_have_one_configuration(tiny_bundle: Path, tiny_files: dict[str, Path]) -> None:
    own = read_config(tiny_bundle)
    found = facts(tiny_bundle)
    assert Config.from_json(json.dumps(found["config"])) == own
    assert found["parameters"]["total"] == sum(costs.parameters(own.architecture).values())
    for path in tiny_files.values():
        of_file = facts(path)
        assert {**of_file, "config": None} == {**found, "config": None}
        assert of_file["config"]["labels"] == list(own.labels)


def test_a_bundled_model_goes_before_a_preset_of_its_name_and_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "cifar10", PRESETS["tiny"])
    assert facts("cifar10")["config"] == json.loads(read_config(MODELS / "cifar10").to_json())
    assert facts()["name"] == facts(DEFAULT)["name"]


def test_a_mean_depth_costs_its_part_of_the_steps() -> None:
    own = Integration(4.0, 8)
    proof = Calibration(0.01, 0.05, 100, "", own.setting(), mean_steps=2.5)
    config = Config(Architecture(), own, exit=ExitPolicy(calibration=proof))
    found = describe(config)["macs"]
    stem = costs.macs_by_part(config.architecture)["stem"]
    assert found["total"] == stem + 8 * found["per_step"]
    assert found["adaptive"] == pytest.approx(stem + 2.5 * found["per_step"], abs=1)
    assert found["adaptive_mean_steps"] == 2.5
    assert "adaptive" not in describe(Config())["macs"]
    assert "teacher" not in describe(Config())


def test_the_table_says_what_is_proven(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    config = read_config(folder)
    plain = said(folder)
    assert "not calibrated" in plain
    assert "labels: ant, bee, cat, dog, eel\n" in plain
    assert "mean depth" not in plain
    proof = Calibration(0.025, 0.1, 1234, "", config.integration.setting(), mean_steps=2.5)
    policy = replace(config.exit, calibration=proof)
    taught = TeacherFacts("vit of ours", 12, 24, 3, 2.0)
    write_config(folder, config.replace(exit=policy, teacher=taught, metrics={"accuracy": 0.75}))
    shown = " ".join(said(folder).split())
    for words in ("2.5%", "90%", "1,234 images", "mean depth of 2.5 steps", "teacher vit of ours", "accuracy: 0.75"):
        assert words in shown
    assert f"{costs.teacher_parameters(taught, config.architecture):,}" in shown
    assert "not calibrated" not in shown


def test_many_labels_are_cut_short(tmp_path: Path) -> None:
    labels = tuple(f"class{i}" for i in range(20))
    write_config(tmp_path, Config(Architecture(classes=20), labels=labels))
    assert "class11, ..." in said(tmp_path)
    assert "class12" not in said(tmp_path)
