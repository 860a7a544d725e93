"""From a run to a bundled model: small, calibrated on what training set aside, measured on the test images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import tiny_model
from PIL import Image
from safetensors.numpy import load_file
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from odevit_serve.bundle import read_config
from odevit_serve.config import Division, TeacherFacts
from odevit_serve.errors import UsageError
from odevit_serve.export import parts
from odevit_serve.export.ship import measure, ship
from odevit_serve.train.recipe import Teaching
from odevit_serve.train.val import NO_TEACHER, ValidationPlan, validate


def test_a_run_becomes_a_model_in_the_box(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (1040, 16, 16, 3), dtype=np.uint8), np.arange(1040) % 5
    data = tmp_path / "data.npz"
    names = np.array(["ant", "bee", "cat", "dog", "eel"])
    np.savez(data, classes=names, x_train=x[:1000], y_train=y[:1000], x_test=x[1000:], y_test=y[1000:])
    model = tiny_model(calibrated=False, stem="convolutions")
    division = Division(0.05, 0.9, own_validation=False)
    model.config = model.config.replace(teacher=TeacherFacts("file", 3, 24, 3, 2.0), division=division)
    model.save_pretrained(tmp_path / "run")
    teacher = str(tmp_path / "teacher.safetensors")
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=3, num_heads=1, mlp_ratio=2, num_classes=5)
    save_file(vit.state_dict(), teacher)
    ship(
        tmp_path / "run",
        tmp_path / "box",
        str(data),
        "A note.",
        {"name": "vit", "license": "mit"},
        Teaching(weights=teacher),
    )
    config = read_config(tmp_path / "box")
    assert config.name == "box"
    assert config.exit.calibration is not None
    assert config.exit.calibration.images <= 855  # none of those it learned from
    assert "calibration" in config.exit.calibration.chosen
    assert config.confidence is not None  # a temperature; a mark cannot be proven of random answers
    assert config.confidence.unsure is None
    assert all(weight.dtype == np.float16 for weight in load_file(tmp_path / "box" / "model.safetensors").values())
    text = (tmp_path / "box" / "README.md").read_text(encoding="utf-8")
    assert "A note." in text
    assert "in full depths of this model | 1 | " in text
    assert "Teacher: vit, licence mit." in text
    (row,) = validate(str(tmp_path / "box"), str(data), ValidationPlan([8]), Teaching(weights=teacher))
    assert config.metrics["accuracy_by_steps"]["8"] == round(row["accuracy"], 4)
    assert config.metrics["test_accuracy_teacher"] == round(row["teacher_accuracy"], 4)
    longer = config.integration.horizon * 1.5
    (row,) = validate(str(tmp_path / "box"), str(data), ValidationPlan([12], [longer]))
    assert config.metrics[f"test_accuracy_horizon_{longer:g}"] == round(row["accuracy"], 4)
    assert config.metrics["test_images"] == 40
    assert 1 <= config.metrics["test_mean_steps_adaptive"] <= 8
    assert set(config.metrics["accuracy_by_steps"]) == {"1", "2", "3", "4", "6", "8", "12", "16", "18", "24"}
    assert config.metrics["accuracy_by_solver"]["euler"] == config.metrics["accuracy_by_steps"]["8"]
    assert len(config.metrics["accuracy_by_solver"]) > 3
    assert set(config.metrics["as_full_depth_by_steps"]) == {"1", "2", "3", "4", "6"}


def test_sets_and_full_size_photographs_are_measured_apart(tmp_path: Path) -> None:
    model = tiny_model()
    rng = np.random.default_rng(0)
    for split, prefixes in (("val", ("red-", "blue-")), ("train", ("red-",))):
        for label in range(5):
            folder = tmp_path / "data" / split / f"class{label}"
            folder.mkdir(parents=True)
            for index, prefix in enumerate(prefixes):
                pixels = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{prefix}{index}.png")
    model.save_pretrained(tmp_path / "box")
    parts(tmp_path / "box")
    data = str(tmp_path / "data")
    found = measure(tmp_path / "box", data, NO_TEACHER, ["red-*", "blue-*"], data)
    sets = found["test_accuracy_by_set"]
    assert set(sets) == {"red", "blue"}
    assert (sets["red"] + sets["blue"]) / 2 == pytest.approx(found["test_accuracy"], abs=1e-4)
    assert found["full_size_accuracy"] == found["test_accuracy"]
    assert found["full_size_images"] == 10
    with pytest.raises(UsageError, match="none of the 10 images has a file name like 'green-\\*'"):
        measure(tmp_path / "box", data, NO_TEACHER, ["green-*"])
