"""`val` measures what it says; whole runs through the command are in test_run.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_model
from PIL import Image
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from odevit_serve import load
from odevit_serve.data.datasets import Images
from odevit_serve.data.division import pick
from odevit_serve.errors import UsageError
from odevit_serve.export import parts
from odevit_serve.train.batches import Batch
from odevit_serve.train.curves import draw_depth
from odevit_serve.train.recipe import Teaching
from odevit_serve.train.val import SPOILT, Sums, ValidationPlan, by_step, known_images, table, validate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (30, 16, 16, 3), dtype=np.uint8), np.arange(30) % 5
    np.savez(tmp_path / "data.npz", x_train=x[:10], y_train=y[:10], x_test=x[10:], y_test=y[10:])
    np.savez(tmp_path / "bare.npz", x=x)
    np.savez(tmp_path / "more.npz", x=x, y=np.arange(30) % 6)
    return tmp_path


def test_a_row_for_each_pair_on_the_test_split(folder: Path) -> None:
    rows = validate(str(folder / "model"), str(folder / "data.npz"), ValidationPlan([4, 8], [2.0, 4.0]), batch_size=7)
    assert [(r["steps"], r["horizon"], r["images"]) for r in rows] == [(4, 2, 20), (8, 2, 20), (4, 4, 20), (8, 4, 20)]
    assert all(r["accuracy"] <= r["accuracy@3"] <= r["accuracy@5"] == 1.0 for r in rows)
    one = validate(str(folder / "model"), str(folder / "data.npz"), ValidationPlan([8]), split="train", limit=4)
    assert one[0]["images"] == 4


def test_early_exit_is_a_row_of_a_calibrated_bundle(folder: Path) -> None:
    model, data = folder / "model", str(folder / "data.npz")
    assert {r["depth"] for r in validate(str(model), data)} == {"fixed"}  # no graphs yet
    parts(model)
    *_, early = validate(str(model), data)
    assert (early["depth"], early["images"]) == ("early exit", 20)
    loaded, images = load(model), pick(data)
    answers = [loaded.predict(images.read(i)) for i in range(20)]
    assert images.labels is not None
    assert early["steps"] == pytest.approx(np.mean([a.steps for a in answers]))
    assert early["accuracy"] == pytest.approx(np.mean([a.index == y for a, y in zip(answers, images.labels)]))
    expected = [-np.log(a.probabilities[y]) for a, y in zip(answers, images.labels)]
    assert early["loss"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert early["steps"] < 8  # otherwise nothing above has been shown
    assert {r["depth"] for r in validate(str(model), data, ValidationPlan([8]))} == {
        "fixed"
    }  # asked for something else


def test_robustness_adds_solvers_and_worse_pictures(folder: Path) -> None:
    rows = validate(str(folder / "model"), str(folder / "data.npz"), ValidationPlan([8], robustness=True))
    assert [r["solver"] for r in rows[:6]] == ["euler", "ab2", "midpoint", "heun", "rk4", "anderson"]
    assert [r["pictures"] for r in rows[6:]] == list(SPOILT)
    losses = [r["loss"] for r in rows]
    assert len(set(losses)) == len(losses)  # each row is computed by itself
    again = validate(str(folder / "model"), str(folder / "data.npz"), ValidationPlan([8], robustness=True))
    assert again == rows  # noise included


def test_the_curve_goes_on_past_the_horizon_in_steps_of_the_same_size(folder: Path) -> None:
    model, data = str(folder / "model"), str(folder / "data.npz")
    walked = by_step(model, data, batch_size=7)
    own = tiny_model().config.integration
    assert len(walked) == 2 * own.steps
    for steps in (1, own.steps, own.steps * 3 // 2):
        (row,) = validate(model, data, ValidationPlan([steps], [steps * own.step_size]))
        assert walked[steps - 1] == pytest.approx(row["accuracy"])
    rows = validate(model, data, ValidationPlan(robustness=True))
    draw_depth(walked, rows, own, folder / "new" / "curve.png")
    with Image.open(folder / "new" / "curve.png") as picture:
        assert picture.format == "PNG"
    with pytest.raises(UsageError, match="has no labels to draw the curve by"):
        by_step(model, str(folder / "bare.npz"))


def test_noise_and_blur_by_hand(folder: Path) -> None:
    config = tiny_model().config
    flat = Batch(torch.zeros(4, 3, 16, 16), torch.zeros(4), torch.arange(4), [])
    noise = SPOILT["noise 0.10"](flat, config)
    assert noise.std().item() == pytest.approx(0.1 / 0.5, rel=0.1)  # pixels are divided by a std of 0.5
    assert SPOILT["blur 1/32"](flat._replace(pixel_values=torch.ones(4, 3, 16, 16)), config) == pytest.approx(1.0)
    spot = torch.zeros(1, 3, 16, 16)
    spot[..., 8, 8] = 1
    spread = SPOILT["blur 1/32"](flat._replace(pixel_values=spot), config)[0, 0]
    assert spread.sum().item() == pytest.approx(1.0, rel=1e-4)
    assert spread[8, 8] < 0.7
    assert spread[8, 7] == pytest.approx(spread[7, 8].item())


def test_the_table_fits_a_narrow_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=3, num_heads=1, mlp_ratio=2, num_classes=5)
    save_file(vit.state_dict(), folder / "teacher.safetensors")
    parts(folder / "model")
    rows = validate(
        str(folder / "model"), str(folder / "data.npz"), teacher=Teaching(weights=str(folder / "teacher.safetensors"))
    )
    capsys.readouterr()
    table(rows)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert all(f"{row['accuracy']:.2%}" in shown for row in rows)
    assert f"20 images; teacher accuracy {rows[0]['teacher_accuracy']:.2%}" in shown


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ("bare.npz", {}, "has no labels: name a teacher"),
        ("more.npz", {}, "the data has 6 classes, the model 5, and no name in common"),
        ("data.npz", {"split": "val"}, "has no split 'val', only train, test"),
        ("data.npz", {"asked": ValidationPlan(solver="eular")}, "unknown solver 'eular'"),
        ("data.npz", {"asked": ValidationPlan([0])}, "steps must be at least 1, not 0"),
    ],
)
def test_bad_settings(folder: Path, data: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        validate(str(folder / "model"), str(folder / data), **settings)  # type: ignore[arg-type]


def test_classes_are_matched_by_name_and_strangers_left_out() -> None:
    config = tiny_model().config.replace(labels=tuple("abcde"), class_ids=("n1", "n2", "n3", "n4", "n5"))
    images = Images(
        [str(i) for i in range(6)], np.array([0, 1, 2, 0, 1, 2]), ("n3", "b", "zebra"), lambda i: NotImplemented
    )
    said: list[str] = []
    known = known_images(config, images, said.append)
    assert known.labels is not None
    assert known.labels.tolist() == [2, 1, 2, 1]
    assert list(known.names) == ["0", "1", "3", "4"]
    assert said == ["2 images of 1 classes that the model does not know are left out"]


def test_macro_accuracy_is_a_mean_over_classes() -> None:
    sums = Sums(4)
    judged = torch.zeros(5, 6)
    judged[:3, 0] = 1  # class 0: three of three; class 1: none of one; class 3: none of one
    sums.add(judged, torch.tensor([0, 0, 0, 1, 3]))
    row = sums.row(True, False)
    assert row["accuracy"] == pytest.approx(0.6)
    assert row["macro_accuracy"] == pytest.approx(1 / 3)
