"""The model card says what the configuration holds, and no more."""

from __future__ import annotations

from pathlib import Path

from odevit_serve.bundle import Calibration, Config, ExitPolicy, Teacher, bundled, find, read_config, write_config
from odevit_serve.card import card, write_card

LABELS = tuple("abcdefghij")


def test_a_bare_model() -> None:
    text = card(Config(labels=LABELS), "mine")
    assert text.startswith("---\nlicense: apache-2.0\n")
    assert "Not calibrated: every image gets the full depth." in text
    assert "Any other picture gets one of these, too." in text
    assert "odevit-serve predict --model mine picture.jpg" in text
    assert "Teacher:" not in text


def test_the_guarantee_the_teacher_and_the_costs() -> None:
    proof = Calibration(0.02, 0.1, 1234, "00", observed=0.015, bound=0.019, mean_steps=5.25, steps=12, horizon=12.0)
    config = Config(
        labels=LABELS,
        exit=ExitPolicy(threshold=0.7, travel=(2.0, 1.0, 0.0), calibration=proof),
        teacher=Teacher("vit", accuracy=0.9, time=1.5, license="mit", note="supervised"),
        metrics={"validation_accuracy": 0.875},
    )
    text = card(config, "mine")
    assert "differs from the full one on at most 2.00% of images, with confidence 90%" in text
    assert "like the 1,234 it was calibrated on" in text
    assert "mean depth 5.25" in text
    assert "| accuracy on validation images | 87.50% | 90.00% |" in text
    assert "in full depths of this model | 1 | 1.5 |" in text
    assert "Teacher: vit (supervised), licence mit." in text
    assert f"{config.teacher.macs(config.architecture):,}" in text  # type: ignore[union-attr]


def test_shipped_cards_are_current() -> None:
    for name in bundled():
        folder = find(name)
        assert (folder / "README.md").read_text(encoding="utf-8") == card(read_config(folder), name)


def test_it_is_written_into_the_bundle(tmp_path: Path) -> None:
    write_config(tmp_path, Config())
    write_card(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == card(Config(), tmp_path.name)
