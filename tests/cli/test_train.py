"""`train` as it is typed: what it takes for a recipe and what for somebody's own pictures, and what it tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_training import command

from odevit_serve import bundle
from odevit_serve.config import Config
from odevit_serve.train import own, run
from odevit_serve.train.finish import Confusion, Finished
from odevit_serve.train.recipe import RECIPES, SELF_SUPERVISED, read_recipe


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 pictures of three classes to train on."""
    path = tmp_path_factory.mktemp("data") / "some.npz"
    np.savez(path, x_train=np.zeros((300, 16, 16, 3), np.uint8), y_train=np.arange(300) % 3)
    return path


def dry(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command("train", *map(str, words), "--dry-run").stdout)
    return found


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "no data: name a folder"),
        (("--preset", "tiny"), 2, "no data: name a folder"),
        (("nowhere",), 1, "no such file or folder: nowhere"),
        (("DATA", "--preset", "tiny", "--minutes", "3"), 2, "--minutes is for training on your own pictures"),
        (("DATA", "--set", "architecture.heads=5"), 2, "width 192 is not divisible by 5 heads"),
        (("DATA", "--set", "training.epoch=5"), 2, "did you mean 'epochs'"),
        (("DATA", "--set", "training.gradient='adjiont'"), 2, "choose one of backprop, checkpoint, truncated, adjoint"),
        (("DATA", "--set", "training.gradient_steps=-1"), 2, "training.gradient_steps must be at least 0, not -1"),
        (("DATA", "--teacher", "vit_tiny"), 2, "write timm:NAME or hf:NAME"),
        (("--resume", "nowhere"), 1, "nowhere holds no run to resume"),
        (("--resume", "nowhere", "--config", "cifar10"), 2, "uses the recipe of the run"),
        (("DATA", "--config", "nothing"), 1, "no recipe 'nothing': shipped are"),
        (("DATA", "--preset", "tiny", "--batch-size", "4000"), 1, "270 training images do not fill one batch of 4000"),
    ],
)
def test_bad_input_is_one_sentence(data: Path, tmp_path: Path, words: tuple[str, ...], code: int, message: str) -> None:
    done = command("train", *(str(data) if w == "DATA" else w for w in words), "-o", tmp_path / "run", check=False)
    assert done.returncode == code
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_dry_run_prints_the_recipe_and_trains_nothing(data: Path, tmp_path: Path) -> None:
    found = dry(data, "--preset", "tiny", "--epochs", 7, "-o", tmp_path / "run")
    assert found["training"]["epochs"] == 7
    assert not (tmp_path / "run").exists()


def test_every_option_is_its_setting_of_the_recipe() -> None:
    found = dry(
        "some where/ü.npz", "--config", "cifar10", "--teacher", "timm:vit", "--teacher-weights", "w 1.safetensors",
        "--teacher-head", "probe", "--batch-size", 9, "--lr", 0.25, "--seed", 4, "--epochs", 5,
        "--set", "training.ema=0.9", "--set", "data.limit=3",
    )  # fmt: skip
    named = read_recipe("cifar10").to_dict()
    named["data"] |= {"source": "some where/ü.npz", "limit": 3}
    named["teacher"] |= {"source": "timm:vit", "weights": "w 1.safetensors", "head": "probe"}
    named["training"] |= {"batch_size": 9, "lr": 0.25, "seed": 4, "epochs": 5, "ema": 0.9}
    assert found == json.loads(json.dumps(named))
    assert dry("d", "--preset", "tiny")["preset"] == "tiny"


@pytest.mark.parametrize("name", ["\N{GRINNING FACE}", 'a "b"', "back\\slash", "tab\there"])
def test_a_folder_of_any_name_is_found(name: str) -> None:
    assert dry(name, "--preset", "tiny")["data"]["source"] == name


def test_self_supervised_is_a_choice_of_losses_that_can_be_changed() -> None:
    losses = dry("d", "--teacher", "timm:vit", "--self-supervised", "--set", "losses.jasmin=0.5")["losses"]
    assert {name: weight for name, weight in losses.items() if weight} == {**SELF_SUPERVISED, "jasmin": 0.5}


def test_pictures_of_ones_own_take_their_own_options() -> None:
    """Only what was given: the rest has its defaults in train/own.py."""
    assert dry("photos") == {"data": "photos"}
    words = ["--epochs", 0, "--batch-size", 4, "--lr", 0.1, "--seed", 0, "--start", "cifar10", "--size", 32]
    assert dry("photos", *words, "--epsilon", 0.02, "--minutes", 2) == {
        "data": "photos", "epochs": 0, "batch_size": 4, "lr": 0.1, "seed": 0, "start": "cifar10", "size": 32,
        "epsilon": 0.02, "minutes": 2,
    }  # fmt: skip
    assert set(dry("photos", *words, "--epsilon", 0.02, "--minutes", 2)) == set(own.Wanted.__dataclass_fields__) - {
        "delta"
    }


@pytest.mark.parametrize("option", ["--minutes", "--start", "--size", "--epsilon"])
@pytest.mark.parametrize("recipe", [["--preset", "tiny"], ["--config", "cifar10"], ["--set", "data.limit=3"],
                                    ["--self-supervised"], ["--teacher", "timm:vit"]])  # fmt: skip
def test_an_option_for_ones_own_pictures_is_refused_beside_a_recipe(option: str, recipe: list[str]) -> None:
    done = command("train", "d", *recipe, option, "1", "--dry-run", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{option} is for training on your own pictures")


def test_recipes_are_listed_with_what_they_are() -> None:
    lines = command("train", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.stem for path in RECIPES.glob("*.toml"))
    for line in lines:
        name, words = line.split(maxsplit=1)
        assert (RECIPES / f"{name}.toml").read_text(encoding="utf-8").startswith(f"# {words}\n")


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ("last.pt", ["--preset", "tiny"]),
        ("bundle/config.json", ["--preset", "tiny"]),
        ("training/run.json", []),
        ("config.json", []),
    ],
)
def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path, left: str, words: list[str]) -> None:
    folder = tmp_path / "mine"
    (folder / left).parent.mkdir(parents=True)
    (folder / left).write_text("{}")
    done = command("train", "nowhere", *words, "-o", folder, check=False)
    assert done.returncode == 2
    assert f"{folder} already holds a run: --resume {folder}" in done.stderr
    assert (folder / left).read_text() == "{}"


def test_a_run_is_resumed_with_its_own_recipe_and_what_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reaches the training, which stops there."""
    asked: list[Any] = []

    def train(recipe: Any, output: Path, say: Any) -> Path:
        asked.extend([recipe, output])
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train", train)
    recipe = read_recipe(None, ["data.source=here", "training.epochs=3", "preset=tiny"])
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    done = command("train", "--resume", tmp_path, "--epochs", "8", check=False)
    assert asked == [read_recipe(None, ["data.source=here", "training.epochs=8", "preset=tiny"]), tmp_path]
    assert done.returncode == 130
    assert f"odevit-serve train --resume {tmp_path}" in done.stderr


def test_a_finished_run_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "train", lambda recipe, output, say: output / "bundle")
    done = command("train", "here", "--preset", "tiny", "-o", tmp_path / "run")
    assert done.stdout == ""
    assert f"bundle: {tmp_path}/run/bundle" in done.stderr
    assert f"odevit-serve export {tmp_path}/run/bundle --format parts" in done.stderr


FINISHED = Finished(Path("my run"), 0.875, (0.5, 0.95), 1234, False, Confusion("cat", "dog", 3, 20), 12.4, 2.25)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({}, 0, ["87.5% of 1,234 photographs", "50.0% to 95.0%", "cat and dog, 3 of 20", "12 ms", "2.2 steps"]),
        ({"confusion": None}, 0, ["no class was confused"]),
        ({"chosen_by": True}, 0, ["that chose it"]),
        ({"interrupted": True}, 130, ["87.5%"]),
    ],
)
def test_what_came_out_is_told(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], code: int, words: list[str]
) -> None:
    asked: list[Any] = []
    made = Finished(**{**vars(FINISHED), **changes})
    monkeypatch.setattr(own, "train", lambda *given: asked.extend(given) or made)
    done = command("train", data, "--size", "32", "-o", tmp_path / "mine", check=False)
    assert done.returncode == code
    assert asked[:2] == [own.Wanted(str(data), size=32), tmp_path / "mine"]
    assert all(word in done.stderr for word in words), done.stderr
    assert done.stderr.splitlines()[-1].endswith("odevit-serve serve 'my run', odevit-serve demo --model 'my run'")
    assert done.stdout == ""


def test_a_run_on_ones_own_pictures_is_resumed_with_what_it_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def train(*given: Any) -> Finished:
        asked.extend(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(own, "train", train)
    (tmp_path / "training").mkdir()
    wanted = {"data": "photos", "epochs": 3, "seed": 1}
    (tmp_path / "training" / "run.json").write_text(json.dumps({"wanted": wanted}))
    done = command("train", "--resume", tmp_path, "--epochs", "9", check=False)
    assert asked[:2] == [own.Wanted("photos", epochs=9, seed=1), tmp_path]
    assert asked[-1] is True
    assert (done.returncode, f"--resume {tmp_path}" in done.stderr) == (130, True)


def test_a_bundle_that_was_trained_elsewhere_holds_no_run(tmp_path: Path) -> None:
    bundle.write_config(tmp_path, Config())
    done = command("train", "--resume", tmp_path, check=False)
    assert (done.returncode, "holds no run to resume" in done.stderr) == (1, True)
