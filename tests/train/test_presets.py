"""The named shapes: their sizes are those of the paper's Table 4, and each can be built and costed."""

from __future__ import annotations

import pytest

from odevit_serve import costs
from odevit_serve.config import Config
from odevit_serve.train.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_its_pictures_and_survives_json(name: str) -> None:
    own = PRESETS[name]
    assert own.name == name
    assert own.preprocessing.input_size[1] == own.architecture.image_size
    assert Config.from_json(own.to_json()) == own


def test_base_has_seven_million_parameters_and_costs_more_than_its_teacher_at_23_steps() -> None:
    """Fewer parameters are not less compute: docs/benchmark.md says so of the paper's own model."""
    own = PRESETS["base-cifar10"]
    assert own.teacher is not None
    assert 6.9e6 < costs.parameters(own.architecture)["psi"] < 7.2e6
    teacher = costs.teacher_macs(own.teacher, own.architecture)
    per_step = costs.macs_per_step(own.architecture, own.integration)
    assert teacher / 1e9 == pytest.approx(17.6, abs=0.1)
    assert 11 < teacher / per_step < 12
