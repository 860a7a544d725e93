"""Training end to end, through the real command: it learns, it resumes, it says what is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_model
from fake_device import fake_device
from PIL import Image
from safetensors.torch import load_file, save_file
from small_training import SMALL, command
from timm.models.vision_transformer import VisionTransformer

from odevit_serve import bundle as bundles
from odevit_serve.bundle import read_config
from odevit_serve.config import Preprocessing
from odevit_serve.train import checkpoint
from odevit_serve.train.batches import PictureDataset
from odevit_serve.train.loop import accelerator
from odevit_serve.train.model import ODEViT
from odevit_serve.train.recipe import GRADIENTS, read_recipe
from odevit_serve.train.run import Run, read_data, remember
from odevit_serve.train.teacher_sources import load_teacher
from odevit_serve.train.warm_start import missed

ENVIRONMENT = {**os.environ, "CI": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes told apart by the brighter half of the picture, under noise."""
    rng = np.random.default_rng(0)
    labels = np.arange(360) % 3
    x = rng.integers(0, 120, (360, 16, 16, 3))
    for image, label in zip(x, labels):
        if label == 0:
            image[:8] += 100
        elif label == 1:
            image[:, :8] += 100
    path = tmp_path_factory.mktemp("data") / "halves.npz"
    np.savez(
        path,
        x_train=x[:300].astype(np.uint8),
        y_train=labels[:300],
        x_test=x[300:].astype(np.uint8),
        y_test=labels[300:],
    )
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=64, depth=3, num_heads=1, mlp_ratio=1, num_classes=3)
    path = tmp_path_factory.mktemp("teacher") / "vit.safetensors"
    save_file(vit.state_dict(), path)
    return path


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_from_scratch_it_learns_and_leaves_a_whole_run_folder(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = command("train", data, *SMALL, "--epochs", "8", "-o", run)
    for name in ("recipe.json", "metrics.jsonl", "curves.png", "last.pt", "bundle/config.json", "bundle/README.md"):
        assert (run / name).is_file(), name
    assert list((run / "tensorboard").iterdir())
    assert Image.open(run / "curves.png").size[0] > 500
    epochs = [row for row in metrics(run) if "epoch" in row]
    assert len(epochs) == 8
    assert epochs[-1]["cross_entropy"] < 0.8 * epochs[0]["cross_entropy"]
    config = read_config(run / "bundle")
    assert config.metrics["validation_accuracy"] > 0.6
    assert str(data.parent) not in config.to_json()
    assert "next: odevit-serve export" in done.stderr
    assert done.stdout == ""
    again = command("train", data, "--preset", "tiny", "-o", run, check=False)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr

    rows = json.loads(
        command("val", run / "bundle", "--data", data, "--steps", "4,8", "--horizon", "4,2", "--json").stdout
    )
    assert [(r["steps"], r["horizon"], r["images"]) for r in rows] == [(4, 4, 60), (8, 4, 60), (4, 2, 60), (8, 2, 60)]
    model = ODEViT.from_pretrained(run / "bundle")
    x = np.load(data)["x_test"]
    pixels = torch.from_numpy(x).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        right = (model(pixels).argmax(-1).numpy() == np.load(data)["y_test"]).mean()
    assert rows[0]["accuracy"] == pytest.approx(right)
    assert rows[0]["accuracy@3"] == 1.0
    text = command("val", run / "bundle", "--data", data, "--steps", "4", "--csv").stdout.splitlines()
    assert text[0].startswith("depth,steps,horizon,solver,images,accuracy")
    assert float(text[1].split(",")[5]) == pytest.approx(right)


@pytest.mark.parametrize("head", ["probe", "finetune"])
def test_a_teacher_gets_its_head_and_the_student_follows(data: Path, teacher: Path, tmp_path: Path, head: str) -> None:
    run = tmp_path / "run"
    settings = ["--set", "teacher.epochs=8", "--set", "teacher.lr=0.003", "--set", "teacher.batch_size=16"]
    settings += ["--set", "teacher.baseline=false"]  # the bundled model knows more than this one
    extra = ["--set", "training.ema=0.9", "--set", "training.optimizer='muon'", "--set", "training.steps=[2,3,5]"]
    done = command(
        "train", data, *SMALL, "--teacher-weights", teacher, "--teacher-head", head, "--epochs", "5", "-o", run,
        *settings, *extra, "--set", "teacher.views=2",
    )  # fmt: skip
    taught = load_file(run / "teacher" / "teacher.safetensors")
    original = load_file(teacher)
    moved = not torch.equal(taught["blocks.0.mlp.fc1.weight"], original["blocks.0.mlp.fc1.weight"])
    assert moved == (head == "finetune")
    student = load_file(run / "bundle" / "model.safetensors")
    torch.testing.assert_close(student["head.weight"], taught["head.weight"])
    torch.testing.assert_close(student["position"], taught["pos_embed"])
    config = read_config(run / "bundle")
    assert config.teacher is not None
    assert config.teacher.accuracy is not None
    assert config.teacher.accuracy > (0.7 if head == "finetune" else 0.35)
    epochs = [row for row in metrics(run) if "epoch" in row]
    assert epochs[-1]["trajectory"] < epochs[0]["trajectory"]
    assert epochs[-1]["agreement"] > 0.5
    assert "teacher layers over a horizon of 4" in done.stderr
    rows = json.loads(
        command(
            "val",
            run / "bundle",
            "--data",
            data,
            "--teacher-weights",
            run / "teacher" / "teacher.safetensors",
            "--json",
        ).stdout
    )
    assert [r["steps"] for r in rows] == [2, 4, 6, 8]
    assert 0.3 < rows[1]["agreement"] <= 1
    assert rows[1]["teacher_accuracy"] > 0.3


def test_a_teacher_that_knows_less_than_the_bundled_model_ends_the_run(
    data: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model().save_pretrained(tmp_path / "models" / bundles.DEFAULT)
    monkeypatch.setattr(bundles, "MODELS", tmp_path / "models")
    blind = load_file(teacher)
    blind["patch_embed.proj.weight"].zero_()  # all pictures look the same to it
    save_file(blind, tmp_path / "blind.safetensors")
    words = ["train", data, *SMALL, "--teacher-weights", tmp_path / "blind.safetensors", "--teacher-head", "probe"]
    done = command(*words, "-o", tmp_path / "run", check=False)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert re.search(r"blind.safetensors has an accuracy of 3\d\.\d% on .* train without a teacher", said)
    assert not (tmp_path / "run" / "bundle").exists()


def test_a_folder_of_unlabelled_pictures_is_enough(data: Path, teacher: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i, pixels in enumerate(np.load(data)["x_train"][:120]):
        Image.fromarray(pixels).save(folder / f"{i}.png")
    (folder / "broken.png").write_bytes(b"\x89PNG broken")
    words = ["train", folder, *SMALL, "--teacher-weights", teacher, "--self-supervised", "--epochs", "3"]
    words += ["--set", "losses.hints=0.5"]
    done = command(*words, "-o", tmp_path / "run")
    assert "unreadable, left out: broken.png" in done.stderr
    epochs = [row for row in metrics(tmp_path / "run") if "epoch" in row]
    assert epochs[-1]["trajectory"] < epochs[0]["trajectory"]
    assert epochs[-1]["hints"] < epochs[0]["hints"]
    assert not [name for name in load_file(tmp_path / "run" / "bundle" / "model.safetensors") if "hints" in name]
    assert "jasmin" in epochs[0]
    assert "accuracy" not in epochs[0]
    (folder / "broken2.png").write_bytes(b"")
    (folder / "broken3.png").write_bytes(b"GIF")
    failed = command(*words, "-o", tmp_path / "run2", check=False)
    assert failed.returncode == 1
    assert "images cannot be read, more than 1%" in failed.stderr.splitlines()[-1]
    assert "Traceback" not in failed.stderr


@pytest.mark.slow
def test_killed_in_mid_epoch_and_resumed_it_ends_with_the_same_weights(
    data: Path, teacher: Path, tmp_path: Path
) -> None:
    words = [
        "train", data, *SMALL, "--teacher-weights", teacher, "--epochs", "3", "--set", "training.save_seconds=0.0",
        "--set", "training.ema=0.9", "--set", "training.optimizer='muon'", "--set", "training.steps=[2,3,5]",
    ]  # fmt: skip
    command(*words, "-o", tmp_path / "whole")
    process = subprocess.Popen(
        [sys.executable, "-m", "odevit_serve", *map(str, words), "-o", str(tmp_path / "cut")],
        env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    checkpoint = tmp_path / "cut" / "last.pt"
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        time.sleep(0.005)
        if checkpoint.exists():
            progress = torch.load(checkpoint, weights_only=True)["progress"]
            if progress["step"] >= 20:
                break
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 20 <= progress["step"] < 16 * 3
    assert progress["batch"] > 0
    command("train", "--resume", tmp_path / "cut")
    whole = load_file(tmp_path / "whole" / "bundle" / "model.safetensors")
    resumed = load_file(tmp_path / "cut" / "bundle" / "model.safetensors")
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=0, msg=name)
    drop = {"seconds"}  # the only figure that may differ
    for a, b in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "cut"), strict=True):
        assert {k: v for k, v in a.items() if k not in drop} == {k: v for k, v in b.items() if k not in drop}


def test_a_stage_that_ended_before_its_first_checkpoint_is_not_taken_for_finished(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between keeping the first bundle and writing where the run stands."""
    run, save = tmp_path / "run", checkpoint.save

    def end(path: Path, *state: object) -> None:
        if (path.parent / "bundle").exists():
            raise KeyboardInterrupt
        save(path, *state)  # type: ignore[arg-type]

    stages = "stages=[{training={epochs=2},architecture={image_size=8}},{training={epochs=1,seed=1}}]"
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", end)
        cut = command("train", data, *SMALL, "--set", stages, "-o", run, check=False)
    assert cut.returncode == 130
    assert (run / "stage-1" / "bundle" / "config.json").exists()
    again = command("train", "--resume", run)
    assert "finished before" not in again.stderr
    assert len([row for row in metrics(run / "stage-1") if "epoch" in row]) == 2


def by_two(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command by two processes of one core each, as the docs have it."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocess.run(
        [*launch, "-m", "odevit_serve", *map(str, words)],
        env={**ENVIRONMENT, "ACCELERATE_USE_CPU": "true"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "settings"),
    [
        ("own", []),
        ("probe", ["losses.hints=0.1"]),  # of layers that few steps do not meet
        ("finetune", ["training.gradient='truncated'", "training.gradient_steps=1", "training.train_stem=true"]),
        ("own", ["training.gradient='adjoint'"]),
    ],
)
def test_two_processes_match_one(data: Path, teacher: Path, tmp_path: Path, head: str, settings: list[str]) -> None:
    words = ["train", data, *SMALL, "--teacher-weights", teacher, "--epochs", "2", "--set", "training.optimizer='muon'"]
    words += ["--teacher-head", head, "--set", "teacher.epochs=1", "--set", "teacher.batch_size=16"]
    words += ["--set", "teacher.baseline=false"]
    words += [word for setting in settings for word in ("--set", setting)]
    command(*words, "-o", tmp_path / "one")
    done = by_two(*words, "-o", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stderr
    assert "Warning" not in done.stderr
    assert done.stderr.count("bundle: ") == 1
    one, two = (load_file(tmp_path / name / "bundle" / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=2e-4, msg=name)
    assert [r["step"] for r in metrics(tmp_path / "one")] == [r["step"] for r in metrics(tmp_path / "two")]
    facts = [read_config(tmp_path / name / "bundle").teacher for name in ("one", "two")]
    assert facts[0] == facts[1]
    assert facts[0] is not None
    assert facts[0].accuracy is not None
    assert not list((tmp_path / "two" / "teacher").glob("*.best"))


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
@pytest.mark.parametrize(
    "settings",
    [
        ["teacher.views=2", "training.optimizer='muon'", "training.mixup=0.4", "teacher.head='finetune'"],
        ["teacher.whole=true", "losses.intermediate=0.5", "losses.transport=0.1", "losses.steady=0.1"],
        ["losses.hints=0.5", "losses.patches=0.5", "losses.jasmin=0.1", "architecture.stem='convolutions'"],
    ],
)
def test_on_another_device_everything_is_where_it_belongs(
    data: Path, teacher: Path, tmp_path: Path, settings: list[str]
) -> None:
    """Trained, averaged, resumed and started from, on a device that refuses what a GPU refuses."""
    chosen = [word for setting in settings for word in ("--set", setting)]
    small = [*SMALL, "--set", "data.limit=64", "--set", "teacher.batch_size=16", "--set", "training.ema=0.9"]
    words = ["train", data, *small, "--teacher-weights", teacher, "--set", "teacher.epochs=1", *chosen]
    with fake_device():
        command(*words, "--epochs", "2", "-o", tmp_path / "run")
    with fake_device():
        command("train", "--resume", tmp_path / "run", "--epochs", "3")
    assert [row["epoch"] for row in metrics(tmp_path / "run") if "epoch" in row] == [1, 2, 3]
    weights = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert all(value.device.type == "cpu" for value in weights["net"].values())
    if "architecture.stem='convolutions'" not in settings:
        return
    start = ["--set", f"training.start='{tmp_path / 'run' / 'bundle'}'", "--set", "training.start_epochs=1"]
    with fake_device():
        command(
            "train", data, *small, *start, "--set", "architecture.stem='deep'", "--epochs", "1", "-o", tmp_path / "more"
        )
    assert (tmp_path / "more" / "bundle" / "model.safetensors").is_file()


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", data, *SMALL, "--epochs", "2", "--lr", "1e30", "--set", "training.save_seconds=0.0", "-o", run]
    done = command(*words, "--set", "training.warmup=0.01", "--set", "training.clip=0.0", check=False)
    assert done.returncode == 1
    assert "the cross_entropy loss became nan" in done.stderr.splitlines()[-1]
    assert torch.load(run / "last.pt", weights_only=True)["progress"]["step"] >= 1


def test_the_bound_stops_a_run(data: Path, teacher: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = command(
        "train", data, *SMALL, "--teacher-weights", teacher, "--epochs", "9", "-o", run,
        "--set", "training.bound_patience=2", "--set", "training.bound_radius=1e6",
    )  # fmt: skip
    assert "below the bound for 2 epochs" in done.stderr
    assert len([row for row in metrics(run) if "epoch" in row]) == 2


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_every_gradient_trains_in_half_precision_too(data: Path, tmp_path: Path, gradient: str) -> None:
    half = ["--set", "training.mixed_precision='bf16'", "--set", f"training.gradient={gradient!r}"]
    command("train", data, *SMALL, *half, "--epochs", "1", "-o", tmp_path / "run")
    assert (tmp_path / "run" / "bundle" / "model.safetensors").is_file()


def test_a_stem_of_convolutions_is_trained_resumed_and_started_from(data: Path, tmp_path: Path) -> None:
    stem = ["--set", "architecture.stem='convolutions'", "--set", "training.ema=0.9"]
    command("train", data, *SMALL, *stem, "--epochs", "2", "-o", tmp_path / "run")
    bundle = tmp_path / "run" / "bundle"
    assert read_config(bundle).metrics["validation_accuracy"] > 0.8
    assert not any("running" in name for name in load_file(bundle / "model.safetensors"))
    command("train", "--resume", tmp_path / "run", "--epochs", "3", "--set", "training.mixup=0.4")
    assert [row["epoch"] for row in metrics(tmp_path / "run") if "epoch" in row] == [1, 2, 3]
    recorded = json.loads((tmp_path / "run" / "recipe.json").read_text())["training"]
    assert (recorded["epochs"], recorded["mixup"]) == (3, 0.4)
    again = ["--set", f"training.start='{bundle}'", "--lr", "1e-9", "--epochs", "1"]
    done = command("train", data, *SMALL, *stem, *again, "-o", tmp_path / "more")
    before, after = (
        load_file(folder / "bundle" / "model.safetensors") for folder in (tmp_path / "run", tmp_path / "more")
    )
    for name, weight in before.items():
        if not name.startswith("patch."):  # the stem's batch norms go on measuring
            torch.testing.assert_close(after[name], weight, atol=1e-5, rtol=1e-4, msg=name)
    old, new = (ODEViT.from_pretrained(tmp_path / name / "bundle") for name in ("run", "more"))
    pixels = torch.randn(64, 3, 16, 16)
    with torch.no_grad():
        assert missed(new.patch(pixels), old.patch(pixels)) < 0.05
    narrow = ["--set", "architecture.mlp_ratio=0.5"]
    done = command("train", data, *SMALL, *stem, *again, *narrow, "-o", tmp_path / "other", check=False)
    assert done.returncode == 2
    assert "cannot become the recipe's model (see psi.mlp." in done.stderr


def test_another_seed_shows_other_views_and_sets_the_same_images_aside(data: Path) -> None:
    asked = [f"data.source='{data}'", "data.limit=100"]
    one, two, three = (
        read_data(read_recipe(None, [*asked, *more]))
        for more in ([], ["training.seed=1"], ["training.seed=1", "data.seed=1"])
    )
    assert [part.names for part in one[:2]] == [part.names for part in two[:2]]
    assert one[1].names != three[1].names
    first, second = (PictureDataset(one[0], Preprocessing((3, 16, 16)), "crop-flip", seed) for seed in (0, 1))
    assert any(not torch.equal(first[row][0], second[row][0]) for row in range(8))


def test_answers_are_remembered_apart_by_all_that_decides_them(data: Path, teacher: Path, tmp_path: Path) -> None:
    """Each of these once took the answers that were made for another."""
    state = load_file(teacher)
    save_file({**state, "norm.bias": state["norm.bias"] + 0.1}, tmp_path / "other.safetensors")
    small = [text for text in SMALL if "=" in text and "augment" not in text]
    asked = [*small, f"data.source='{data}'", f"teacher.weights='{teacher}'", "data.limit=100", "teacher.views=2"]

    def folder(*more: str, times: tuple[int, ...] = (1, 3)) -> str:
        recipe = read_recipe(None, [*asked, *more])
        learning, _, _ = read_data(recipe)
        config = recipe.model(3, learning.classes)
        run = Run(recipe, recipe, tmp_path, tmp_path, accelerator(), print)
        own = load_teacher(recipe.teacher, config.architecture)
        cache, _ = remember(run, own, dict.fromkeys(times, 4.0), learning, config)
        assert cache is not None
        return cache.folder.name

    others = [
        "data.augment='flip'", "data.augment='none'", "training.seed=1", "data.seed=1", "data.limit=99",
        "teacher.weights='" + str(tmp_path / "other.safetensors") + "'", "teacher.image_size=32", "teacher.views=3",
        "data.crop_pct=0.9", "architecture.image_size=32",
    ]  # fmt: skip
    found = [folder(), *(folder(other) for other in others), folder(times=(2, 3)), folder(times=(1, 2, 3))]
    assert len(set(found)) == len(found)
    assert folder("training.lr=1.0", "training.epochs=7") == found[0]


def test_what_a_killed_run_left_is_gone_when_it_is_resumed(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command("train", data, *SMALL, "--epochs", "1", "-o", run)
    left = run / "bundle" / ".model.safetensors.abc.part"
    left.write_bytes(b"half")
    command("train", "--resume", run)
    assert not left.exists()
    assert (run / "last.pt").exists()


def test_a_start_from_a_smaller_bundle_keeps_what_it_knows(data: Path, tmp_path: Path) -> None:
    stem = ["--set", "architecture.stem='convolutions'", "--set", "training.ema=0.9"]
    command("train", data, *SMALL, *stem, "--epochs", "3", "-o", tmp_path / "run")
    bundle = tmp_path / "run" / "bundle"
    more = ["--set", f"training.start='{bundle}'", "--set", "training.start_epochs=12", "--epochs", "1"]
    grown = ["--set", "architecture.mlp_ratio=3.0", "--set", "architecture.stem_width=16"]
    done = command("train", data, *SMALL, *stem, *more, *grown, "-o", tmp_path / "more")
    assert "first it is trained to give the same output" in done.stderr
    explained = [row["explained"] for row in metrics(tmp_path / "more" / "stem") if "epoch" in row]
    assert len(explained) == 12
    assert explained[0] < explained[-1]
    assert read_config(tmp_path / "more" / "bundle").architecture.stem_width == 16
    again = command("train", "--resume", tmp_path / "more", "--epochs", "2")
    assert "first it is trained" not in again.stderr
    same = ["--set", f"training.start='{bundle}'", "--epochs", "0"]
    done = command("train", data, *SMALL, *stem, *same, "-o", tmp_path / "same")
    assert "nothing to learn: accuracy" in done.stderr
    found, asked = read_config(tmp_path / "same" / "bundle"), read_config(bundle)
    assert found.metrics["validation_accuracy"] == asked.metrics["validation_accuracy"]


def test_stages_follow_each_other_and_a_finished_one_is_not_run_again(data: Path, tmp_path: Path) -> None:
    stages = "stages=[{training={epochs=3,stop_after=2},architecture={image_size=8}},{training={epochs=1,seed=1}}]"
    run = tmp_path / "run"
    words = ["train", data, *SMALL, "--set", stages, "-o", run]
    done = command(*words)
    assert "stage 1 of 2" in done.stderr
    assert read_config(run / "stage-1" / "bundle").architecture.image_size == 8
    config = read_config(run / "bundle")
    assert config.architecture.image_size == 16
    assert [stage["training"]["epochs"] for stage in config.provenance["recipe"]["stages"]] == [3, 1]
    judged = [json.loads(line) for line in (run / "stage-1" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in judged if "epoch" in line] == [1, 2]  # of three
    assert not list(run.glob("stage-*/last.pt"))
    first = load_file(run / "stage-1" / "bundle" / "model.safetensors")
    more = stages[:-1] + ",{training={epochs=1,seed=2,lr=1e-9}}]"
    again = command("train", "--resume", run, "--set", more)
    assert "stage 2 of 3: finished before" in again.stderr
    last, second = (load_file(run / name / "model.safetensors") for name in ("bundle", "stage-2/bundle"))
    for name, weight in second.items():
        torch.testing.assert_close(last[name], weight, atol=1e-4, rtol=1e-4, msg=name)
    assert not torch.equal(first["head.weight"], last["head.weight"])


def test_a_last_stage_takes_class_frequencies_out_of_the_head(tmp_path: Path) -> None:
    """Of 240 pictures that are told by nothing, 160 are of class 0: the head says so, and afterwards it does not."""
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 0, 0, 0, 1, 2], 40)
    x = rng.integers(0, 256, (240, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "uneven.npz", x_train=x, y_train=labels, classes=np.array(["a", "b", "c"]))
    stages = "stages=[{training={epochs=1}},{training={epochs=0,balance=1.0}}]"
    command("train", tmp_path / "uneven.npz", *SMALL, "--set", "training.train_head=true", "--set", stages,
            "-o", tmp_path / "run")  # fmt: skip
    before, after = (ODEViT.from_pretrained(tmp_path / "run" / f"stage-{n}" / "bundle") for n in (1, 2))
    learning, _, _ = read_data(read_recipe(tmp_path / "run" / "recipe.json", []))
    assert learning.labels is not None
    counts = np.bincount(learning.labels)
    assert torch.equal(after.head.weight, before.head.weight)
    expected = np.log(counts / counts.mean())
    np.testing.assert_allclose((before.head.bias - after.head.bias).detach().numpy(), expected, atol=1e-5)
    assert expected[0] > 0.5
