"""Recipes: what is refused, and with which words, before any work is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from odevit_serve import costs
from odevit_serve.config import Preprocessing
from odevit_serve.errors import UsageError, UserError
from odevit_serve.train.presets import PRESETS
from odevit_serve.train.recipe import RECIPES, read_recipe


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_recipe_is_sound(path: Path) -> None:
    recipe = read_recipe(path.stem)
    classes = tuple(recipe.data.names) or tuple("abcdefghij")
    config = recipe.model(len(classes), classes)
    assert len(set(config.labels)) == len(classes)
    shape = config.architecture
    assert costs.parameters(shape)["psi"] > 0
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_papers_parameters(name: str) -> None:
    """Table 4 counts millions of trained parameters: 0.5, 4.2, 7 and 3.8 (its 0.5 and 4.2 include the frozen ones)."""
    parameters = costs.parameters(PRESETS[name].architecture)
    expected = {"scratch-cifar10": 0.22, "tiny": 0.45, "tiny-224": 0.45}
    expected |= dict.fromkeys(("scratch-cifar100", "scratch-imagenet100"), 3.54)
    expected |= {n: 7.1 for n in PRESETS if n.startswith("base")} | {n: 3.55 for n in PRESETS if n.startswith("small")}
    assert parameters["psi"] / 1e6 == pytest.approx(expected[name], abs=0.02)


def test_overrides_reach_every_section(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('preset = "tiny"\n[training]\nlr = 0.5\n')
    recipe = read_recipe(
        file, ["training.epochs=3", "architecture.heads=6", "teacher.source=timm:x", "data.augment='flip'"]
    )
    assert (recipe.training.lr, recipe.training.epochs, recipe.data.augment) == (0.5, 3, "flip")
    assert recipe.model(10, ()).architecture.heads == 6
    assert recipe.losses.distillation > 0  # a teacher brings its own losses
    assert read_recipe(None).losses.cross_entropy == 1.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.epoch=3", "did you mean 'epochs'"),
        ("trainng.epochs=3", "did you mean 'training'"),
        ("training.epochs=0", "training.epochs must be at least 1, not 0"),
        ("training.epochs='many'", "training.epochs must be of type int, not 'many'"),
        ("training.optimizer=sgd", "'sgd': choose one of adamw, muon"),
        ("preset=tinny", "unknown preset 'tinny': did you mean 'tiny'"),
        ("data.augment=cutmix", "'cutmix': choose one of"),
        ("losses.trajectory=1", "losses.trajectory follows a teacher"),
        ("losses.cross_entropy=0", "nothing to learn from"),
        ("data.crop_pct=1.5", "from 0 to 1, not 1.5"),
        ("training.mixup=-1", "must be 0 or more, not -1"),
        ("training.beyond=-1", "from 0 to 4, not -1"),
        ("training.solvers=['leapfrog']", "'leapfrog' is none of euler"),
        ("training.steps=[0,3]", r"numbers from 1 on, not \[0, 3\]"),
        ("stages=[{training={epochs=-1}}]", "training.epochs must be at least 1, not -1"),
        ("stages=[{training={epochs=0}}]", "training.epochs must be at least 1, not 0"),
        ("stages=[{},{training={epochs=-1}}]", "training.epochs must be at least 0, not -1"),
        ("stages=[{trainning={epochs=1}}]", r"stages\[0\] has no section 'trainning'"),
        ("stages=[{training={epoch=1}}]", r"stages\[0\]\.training has an unknown field 'epoch'"),
        ("epochs", "section.key=value"),
    ],
)
def test_impossible_settings(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_recipe(None, [override])


@pytest.mark.parametrize("chosen", ["integration.solver=anderson", "training.solvers=['euler','anderson']"])
def test_a_solver_that_does_not_follow_time_in_training(chosen: str) -> None:
    assert read_recipe(None, [chosen, "training.gradient=implicit"]).training.gradient == "implicit"
    with pytest.raises(UsageError, match=r"anderson has no sub-flows: integration\.splitting must be parallel"):
        read_recipe(None, [chosen, "integration.splitting=lie"])
    with pytest.raises(UsageError, match="'adjoint' integrates back in time, which the solver anderson does not"):
        read_recipe(None, [chosen, "training.gradient=adjoint"])


def test_the_middle_that_is_judged_is_the_teachers_unless_asked() -> None:
    teachers = Preprocessing((3, 224, 224), crop_pct=0.9)
    assert read_recipe(None).model(2, ("a", "b"), teachers).preprocessing.crop_pct == 0.9
    assert read_recipe(None, ["data.crop_pct=0.8"]).model(2, ("a", "b"), teachers).preprocessing.crop_pct == 0.8


@pytest.mark.parametrize("loss", ["patches", "hints"])
def test_patches_are_compared_at_one_size_only_and_not_remembered(loss: str) -> None:
    followed = ["teacher.source='timm:any'", f"losses.{loss}=1"]
    assert getattr(read_recipe(None, followed).losses, loss) == 1
    with pytest.raises(UsageError, match=rf"cannot serve losses\.{loss}"):
        read_recipe(None, [*followed, "teacher.views=2"])
    with pytest.raises(UsageError, match=r"patch by patch: teacher\.image_size"):
        read_recipe(None, [*followed, "teacher.image_size=64"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("architecture.heads=5", "width 192 is not divisible by 5 heads"),
        ("architecture.patch_size=5", "image size 32 is not divisible by patch size 5"),
        ("integration.solver=eulr", "unknown solver 'eulr'"),
        ("integration.steps=0", "steps must be at least 1, not 0"),
        ("integration.horizon=-1", "horizon must be a positive number, not -1"),
        ("architecture.convolution=2", "odd kernel size, not 2"),
        ("architecture.widht=2", "unknown field 'widht'"),
    ],
)
def test_impossible_models(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_recipe(None, [override]).model(10, ())


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no recipe 'nothing': shipped are"):
        read_recipe("nothing")
    bad = tmp_path / "bad.toml"
    bad.write_text("a = = b")
    with pytest.raises(UserError, match="not valid TOML"):
        read_recipe(bad)


@pytest.mark.parametrize(
    ("text", "asked", "words"),
    [
        ('{"preset": ' + "[" * 3000, [], "is not valid JSON"),
        ('{"architecture": null}', ["architecture.width=64"], "'architecture' of the recipe is no section"),
        ('{"teacher": 3}', [], "teacher must be an object, not 3"),
        ('{"stages": [{"preset": {"a": 1}}]}', [], "has no section 'preset'"),
    ],
)
def test_a_recipe_that_holds_anything_is_refused_in_a_sentence(
    text: str, asked: list[str], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "recipe.json"
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        read_recipe(file, asked)


def test_a_folder_in_place_of_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_recipe(tmp_path)
