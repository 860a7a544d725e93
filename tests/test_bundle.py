"""The configuration of a bundle: written and read again, checked, and found by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odevit_serve import bundle
from odevit_serve.config import Architecture, Config, Integration, Preprocessing, TeacherFacts
from odevit_serve.errors import UsageError, UserError


def test_writing_and_reading_is_the_identity(tmp_path: Path) -> None:
    config = Config(
        Architecture(64, 8, 96, 3, classes=2, registers=1, stem="deep"),
        Integration(6.0, 5, "ab2", "lie"),
        Preprocessing((3, 64, 64), crop_pct=0.9),
        labels=("größe", "b"),
        teacher=TeacherFacts("x", accuracy=0.5),
        metrics={"test_accuracy": 0.25},
    )
    bundle.write_config(tmp_path, config)
    assert bundle.read_config(tmp_path) == config
    processor = json.loads((tmp_path / bundle.PROCESSOR).read_text(encoding="utf-8"))
    assert (processor["crop_pct"], processor["input_size"]) == (0.9, [3, 64, 64])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"model_type": "vit"}', "is not the configuration of an ODE-ViT but of a 'vit': it has no schema_version"),
        ('{"schema_version": 1}', "is of schema version 1, and this version reads 2: make it again"),
        ('{"schema_version": 2, "labels": ["a"]}', "labels: 1 names for a head of 10 classes"),
        ('{"schema_version": 2, "architecture": {"width": "x"}}', "architecture.width must be of type int, not 'x'"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_the_file(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / bundle.CONFIG).write_text(text)
    with pytest.raises(UserError) as failure:
        bundle.read_config(tmp_path)
    assert str(failure.value).startswith(str(tmp_path / bundle.CONFIG))
    assert sentence in str(failure.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"width": 10, "heads": 3}, "width 10 is not divisible by 3 heads"),
        ({"image_size": 30, "patch_size": 4}, "image size 30 is not divisible by patch size 4"),
        ({"convolution": 2}, "convolution must be 0 or an odd kernel size, not 2"),
        ({"attention": "flash"}, "unknown attention 'flash': choose one of dot, l2"),
        ({"stem": "deep", "image_size": 30, "patch_size": 6}, "patch_size 6 is no power of 2"),
    ],
)
def test_shapes_that_cannot_be(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Architecture(**settings)  # type: ignore[arg-type]


def test_models_are_found_by_name_folder_and_file(tmp_path: Path) -> None:
    assert bundle.find("cifar10") == bundle.MODELS / "cifar10"
    assert bundle.find() == bundle.MODELS / bundle.DEFAULT
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "file.onnx").write_bytes(b"")
    assert bundle.find(tmp_path / "file.onnx") == tmp_path / "file.onnx"  # what is in it is seen when it is opened
    with pytest.raises(UserError, match=r"has no config\.json"):
        bundle.find(tmp_path)
    with pytest.raises(UserError, match=r"neither a bundle folder nor an \.onnx file"):
        bundle.find(tmp_path / "text.txt")
    with pytest.raises(UserError, match=r"no model 'cifar11': bundled are .*cifar10"):
        bundle.find("cifar11")


def test_other_weights_lose_what_was_measured_of_the_old_ones() -> None:
    config = bundle.read_config(bundle.find("cifar10"))
    bare = config.unmeasured()
    assert (bare.exit.calibration, bare.confidence, bare.metrics, bare.division) == (None, None, {}, None)
    assert bare.provenance["started_from"] == config.name
    assert bare.architecture == config.architecture


@pytest.mark.parametrize(
    ("was", "becomes", "words"),
    [
        ('"steps": 12', '"steps": ' + "[" * 3000, "is not valid JSON"),
        ('"horizon": 12.0', '"horizon": 1' + "0" * 400, "integration.horizon must be finite"),
        ('"width": 192', '"width": 1' + "0" * 400, "width must be from 1 to"),
        ('"mlp_ratio": 4.0', '"mlp_ratio": 1e300', "mlp_ratio must be from 0 to"),
        ('"solver": "euler"', '"solver": "' + "x" * 100_000 + '"', "unknown solver 'xxx"),
        ('"labels": []', '"labels": {"' + "x" * 100_000 + '": 1}', "labels must be a list"),
        ('"license"', '"' + "x" * 100_000 + '"', "unknown field 'xxx"),
    ],
)
def test_a_configuration_that_holds_anything_is_refused_in_a_short_sentence(was: str, becomes: str, words: str) -> None:
    text = Config().to_json()
    assert was in text
    with pytest.raises(UserError, match=words) as caught:
        Config.from_json(text.replace(was, becomes))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("splitting", ["lie", "strang"])
def test_a_solver_that_does_not_follow_time_takes_no_splitting(splitting: str) -> None:
    with pytest.raises(
        UsageError, match=f"anderson has no sub-flows: it needs the splitting parallel, not {splitting}"
    ):
        Integration(12.0, 4, "anderson", splitting)
    with pytest.raises(UsageError, match="anderson has no sub-flows"):
        Integration(12.0, 4, "euler", splitting).by("anderson")
    assert Integration(12.0, 4, "euler", splitting).by("anderson", "parallel").solver == "anderson"
    assert Integration(12.0, 4, tolerance=2.0).by("anderson").tolerance == 0
