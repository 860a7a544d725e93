"""Which pictures may calibrate a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odevit_serve import bundle
from odevit_serve.config import Config, Division
from odevit_serve.errors import UserError
from odevit_serve.guarantee.provenance import choose_images


def trained_on(config: Config, name: str, **division: Any) -> Config:
    provenance = {"recipe": {"data": {"source": name}}}
    return config.replace(division=Division(**division), provenance=provenance)


def test_pictures_that_trained_or_chose_a_model_do_not_calibrate_it(tiny_bundle: Path, tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (100, 16, 16, 3), np.uint8), np.arange(100) % 5
    both, alone = tmp_path / "d.npz", tmp_path / "e.npz"
    np.savez(both, x_train=x[:70], y_train=y[:70], x_val=x[70:90], y_val=y[70:90], x_test=x[90:], y_test=y[90:])
    np.savez(alone, x_train=x, y_train=y)
    plain = bundle.read_config(tiny_bundle)
    aside = choose_images(trained_on(plain, "d.npz", calibration=0.2), str(both), None)
    assert "'calibration'" in aside.words
    assert len(aside.images) == 15  # three of each class of the 70
    assert not aside.warning
    known = trained_on(plain, "d.npz")
    assert len(choose_images(known, str(both), None).images) == 10  # the test images
    for split, part in (("train", "trained this model"), ("validation", "chose its weights"), ("val", "chose its")):
        with pytest.raises(UserError, match=part):
            choose_images(known, str(both), split)
    chosen = choose_images(trained_on(plain, "d.npz", own_validation=False), str(both), "val")
    assert len(chosen.images) == 20
    with pytest.raises(UserError, match=r"all images of e\.npz trained this model or chose its weights"):
        choose_images(trained_on(plain, "e.npz"), str(alone), None)
    unknown = choose_images(trained_on(plain, "other.npz", calibration=0.2), str(alone), None, limit=30)
    assert len(unknown.images) == 30  # all of them may be drawn: the division is that of other pictures
    assert "it is not known whether these 100 pictures trained this model" in unknown.warning
    assert not choose_images(plain, str(both), None).warning
