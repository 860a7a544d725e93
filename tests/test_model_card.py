"""The model card says what the configuration holds, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
from camera import shots

from odevit_serve import costs, load
from odevit_serve.bundle import bundled, find, read_config, write_config
from odevit_serve.config import Calibration, Config, ExitPolicy, Integration, Setting, TeacherFacts
from odevit_serve.model_card import accuracy_at, card, write_card
from odevit_serve.runtime.exits import ExitReason

LABELS = tuple("abcdefghij")


def test_a_bare_model() -> None:
    text = card(Config(labels=LABELS), "mine")
    assert text.startswith("---\nlicense: apache-2.0\n")
    assert "Not calibrated: every image gets the full depth." in text
    assert "Any other picture gets one of these, too." in text
    assert "odevit-serve predict --model mine picture.jpg" in text
    assert "Teacher:" not in text


def test_the_guarantee_the_teacher_and_the_costs() -> None:
    setting = Setting(12, 12.0)
    proof = Calibration(0.02, 0.1, 1234, "00", setting, observed=0.015, bound=0.019, mean_steps=5.25)
    config = Config(
        labels=LABELS,
        exit=ExitPolicy("travel", 0.7, travel=(2.0, 1.0, 0.0), calibration=proof),
        teacher=TeacherFacts("vit", accuracy=0.9, time=1.5, license="mit", note="supervised"),
        metrics={"validation_accuracy": 0.875},
    )
    text = card(config, "mine")
    assert (
        "differs from the full one on at most 2.00% of images like the 1,234 it was tested on, with confidence 90%"
        in text
    )
    assert "mean depth 5.25" in text
    assert "| accuracy on validation images | 87.50% | 90.00% |" in text
    assert "in full depths of this model | 1 | 1.5 |" in text
    assert "Teacher: vit (supervised), licence mit." in text
    assert f"{costs.teacher_macs(config.teacher, config.architecture):,}" in text  # type: ignore[union-attr]


def test_shipped_cards_are_current() -> None:
    for name in bundled():
        folder = find(name)
        assert (folder / "README.md").read_text(encoding="utf-8") == card(read_config(folder), name)


@pytest.mark.parametrize("name", bundled())
def test_both_criteria_end_images_of_the_shipped_models(name: str) -> None:
    """On the images that proved it, by the card, and on pictures of today: by the rule, and by the Lyapunov time."""
    proof = read_config(find(name)).exit.calibration
    assert proof is not None
    for reason in ("stopped early", "Lyapunov time"):
        assert proof.exits[reason] > 0
        assert f"{reason} {proof.exits[reason]:.1%}" in (find(name) / "README.md").read_text(encoding="utf-8")
    model = load(name, threads=1)
    side = model.config.architecture.image_size
    found = {answer.exit for seed in range(4) for answer in model.predict(shots(250, seed, blur=0.0, side=side))}
    assert {ExitReason.EARLY, ExitReason.LYAPUNOV} <= found


def test_it_is_written_into_the_bundle(tmp_path: Path) -> None:
    write_config(tmp_path, Config())
    write_card(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == card(Config(), tmp_path.name)


def test_what_was_measured_is_quoted_for_other_steps_and_solvers() -> None:
    own = Integration(12.0, 4, "euler", "parallel")
    measured = {"accuracy_by_steps": {"2": 0.5, "4": 0.6}, "accuracy_by_solver": {"heun": 0.61}}
    config = Config(integration=own, metrics=measured)
    assert accuracy_at(config, Integration(12.0, 2)) == (
        "measured accuracy 50.0% at 2 steps, 60.0% at the bundle's own 4",
        pytest.approx(10.0),
    )
    assert accuracy_at(config, Integration(12.0, 4, "heun"))[0].startswith("measured accuracy 61.0% at 4 steps of heun")
    assert accuracy_at(config, Integration(12.0, 3)) == ("accuracy was never measured at 3 steps, only at 2, 4", None)
    for other in (Integration(12.0, 2, "heun"), Integration(6.0, 4), Integration(12.0, 4, "rk4")):
        assert accuracy_at(config, other) == (f"accuracy was never measured at {other}", None)
    other = Integration(12.0, 2)
    assert accuracy_at(Config(integration=own), other) == (f"accuracy was never measured at {other}", None)
    assert accuracy_at(Config(integration=own), own) == ("", None)
