"""What `config.json` says: written and read again, and refused in one sentence where it cannot be."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odevit_serve import bundle
from odevit_serve.config import (
    ATTENTIONS,
    STEMS,
    Architecture,
    Calibration,
    Confidence,
    Config,
    ExitPolicy,
    Integration,
    Preprocessing,
    Setting,
    TeacherFacts,
    Unsure,
)
from odevit_serve.errors import UsageError, UserError
from odevit_serve.solvers import SOLVERS, SPLITTINGS, splits

NUMBERS = st.floats(-1e6, 1e6)
PAIRS = [(solver, splitting) for solver in SOLVERS for splitting in SPLITTINGS if splits(solver, splitting)]


@st.composite
def integrations(draw: st.DrawFn) -> Integration:
    solver, splitting = draw(st.sampled_from(PAIRS))
    tolerant = SOLVERS[solver].estimates and splitting == "parallel"
    tolerance = draw(st.floats(0, 10)) if tolerant else 0.0
    return Integration(draw(st.floats(0.01, 100)), draw(st.integers(1, 200)), solver, splitting, tolerance)


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    patch, heads = 2 ** draw(st.integers(1, 5)), draw(st.integers(1, 8))
    return Architecture(
        patch * draw(st.integers(1, 20)), patch, heads * draw(st.integers(1, 50)), heads,
        classes=draw(st.integers(1, 5)), registers=draw(st.integers(0, 4)), attention=draw(st.sampled_from(ATTENTIONS)),
        convolution=draw(st.sampled_from([0, 1, 3, 5])), channels=draw(st.integers(1, 4)),
        stem=draw(st.sampled_from(STEMS)), stem_width=draw(st.integers(0, 200)),
    )  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> Config:
    shape, integration = draw(architectures()), draw(integrations())
    setting = integration.setting("fp16", "a" * 64)
    proof = Calibration(0.01, 0.05, 500, "b" * 64, setting, exits={"full depth": draw(st.floats(0, 1))})
    names = draw(st.lists(st.text(min_size=1), min_size=shape.classes, max_size=shape.classes, unique=True))
    travel = tuple(draw(st.one_of(st.just([]), st.lists(NUMBERS, min_size=2))))
    limit = draw(st.one_of(st.none(), NUMBERS))
    side = shape.image_size
    return Config(
        shape, integration,
        Preprocessing((shape.channels, side, side), (0.5,) * shape.channels, (0.25,) * shape.channels, crop_pct=0.9),
        labels=tuple(names),
        exit=ExitPolicy("drift", draw(NUMBERS), limit, travel, 4.0, draw(st.sampled_from([None, proof]))),
        confidence=draw(st.sampled_from([None, Confidence(2.0, 10, 0.1, 0.2, Unsure(0.5, 0.1, 0.05, 90))])),
        teacher=draw(st.sampled_from([None, TeacherFacts("größe", accuracy=0.5)])),
        exported_from=draw(st.sampled_from([None, integration])),
        name=draw(st.text()),
        metrics={"by_steps": {"4": draw(NUMBERS)}},
    )  # fmt: skip


@given(configs())
def test_writing_and_reading_is_the_identity(config: Config) -> None:
    assert Config.from_json(config.to_json()) == config


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
def test_what_is_wrong_is_one_sentence_with_the_file(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as failure:
        Config.from_json(text, "here/config.json")
    assert str(failure.value).startswith("here/config.json")
    assert sentence in str(failure.value)


@pytest.mark.parametrize(
    ("was", "becomes", "words"),
    [
        ('"steps": 12', '"steps": ' + "[" * 3000, "is not valid JSON"),
        ('"steps": 12', '"steps": 1' + "0" * 400, "steps may be at most"),
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


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"width": 10, "heads": 3}, "width 10 is not divisible by 3 heads"),
        ({"image_size": 30, "patch_size": 4}, "image size 30 is not divisible by patch size 4"),
        ({"convolution": 2}, "convolution must be 0 or an odd kernel size, not 2"),
        ({"attention": "flash"}, "unknown attention 'flash': choose one of dot, l2"),
        ({"stem": "deep", "image_size": 30, "patch_size": 6}, "patch_size 6 is no power of 2"),
        ({"mlp_ratio": 0.001}, r"mlp_ratio 0\.001 of width 192 leaves no hidden unit"),
        ({"registers": -1}, "registers must be from 0 to"),
    ],
)
def test_shapes_that_cannot_be(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Architecture(**settings)


@given(architectures())
def test_a_stem_leads_from_the_picture_to_the_grid(shape: Architecture) -> None:
    """Each convolution takes what the one before gives, and together they shrink the picture to the patches."""
    channels, side = shape.channels, shape.image_size
    for inputs, outputs, _, stride, after in shape.convolutions():
        assert inputs == channels
        assert side == stride * after
        channels, side = outputs, after
    assert (channels, side) == (shape.width, shape.grid)
    assert shape.tokens == 1 + side**2 + shape.registers


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"horizon": 0.0}, r"horizon must be a positive number, not 0\.0"),
        ({"horizon": math.inf}, "horizon must be a positive number, not inf"),
        ({"solver": "magic"}, "unknown solver 'magic': choose one of euler"),
        ({"splitting": "magic"}, "unknown splitting 'magic': choose one of parallel"),
        ({"tolerance": -1.0}, r"tolerance must be a number of 0 or more, not -1\.0"),
        ({"tolerance": math.nan}, "tolerance must be a number of 0 or more, not nan"),
        ({"tolerance": 1.0, "solver": "rk4"}, r"needs the solver euler or ab2 .* not rk4 \(parallel\)"),
        ({"tolerance": 1.0, "splitting": "lie"}, r"needs .* not euler \(lie\)"),
    ],
)
def test_integrations_that_cannot_be(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Integration(**settings)


@given(integrations(), st.sampled_from(["fp32", "int8"]))
def test_a_setting_holds_the_whole_integration(own: Integration, precision: str) -> None:
    setting = own.setting(precision, "stem", "step")
    assert setting.integration == own
    assert (setting.precision, setting.stem, setting.step) == (precision, "stem", "step")
    assert setting != own.setting(precision, "stem", "another")
    assert own.steps * own.step_size == pytest.approx(own.horizon)


@given(integrations(), st.sampled_from(PAIRS))
def test_another_solver_takes_the_same_steps_and_the_tolerance_where_it_can(
    own: Integration, pair: tuple[str, str]
) -> None:
    other = own.by(*pair)
    assert (other.solver, other.splitting) == pair
    assert (other.steps, other.horizon) == (own.steps, own.horizon)
    able = SOLVERS[pair[0]].estimates and pair[1] == "parallel"
    assert other.tolerance == (own.tolerance if able else 0)
    assert own.by() == own
    assert own.by(tolerance=0.0) == Integration(own.horizon, own.steps, own.solver, own.splitting)


@pytest.mark.parametrize("splitting", ["lie", "strang"])
def test_a_solver_that_does_not_follow_time_takes_no_splitting(splitting: str) -> None:
    with pytest.raises(
        UsageError, match=f"anderson has no sub-flows: it needs the splitting parallel, not {splitting}"
    ):
        Integration(12.0, 4, "anderson", splitting)
    with pytest.raises(UsageError, match="anderson has no sub-flows"):
        Integration(12.0, 4, "euler", splitting).by("anderson")
    assert Integration(12.0, 4, "euler", splitting).by("anderson", "parallel").solver == "anderson"


def test_an_integration_in_words() -> None:
    assert str(Integration(12.0, 4, "heun", "lie")) == "4 steps of heun (lie) over horizon 12"
    assert str(Integration(1.5, 4, tolerance=0.5)).startswith("at most 4 steps of euler")
    assert "tolerance 0.5" in str(Integration(1.5, 4, tolerance=0.5))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"interpolation": "magic"}, "unknown interpolation 'magic': choose one of nearest"),
        ({"crop_mode": "magic"}, "unknown crop_mode 'magic'"),
        ({"mean": (0.5,)}, "mean and std have 1 and 3 values for 3 channels"),
        ({"std": (0.5, 0.5, 0.0)}, r"std must be positive, not 0\.0"),
        ({"crop_pct": 0.0}, r"crop_pct must be above 0 and at most 1, not 0\.0"),
        ({"crop_pct": 1.1}, "crop_pct must be above 0"),
        ({"input_size": (0, 32, 32), "mean": (), "std": ()}, r"input_size must be positive, not \[0, 32, 32\]"),
    ],
)
def test_preprocessing_that_cannot_be(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Preprocessing(**settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model_type": "vit"}, "unknown model_type 'vit'"),
        ({"labels": ("a",)}, "labels: 1 names for a head of 10 classes"),
        ({"class_ids": ("a",)}, "class_ids: 1 for 0 labels"),
        ({"exit": ExitPolicy(travel=(1.0,))}, "a number for each step and one for the start"),
        ({"preprocessing": Preprocessing((3, 64, 64))}, r"\[3, 64, 64\] does not match architecture.image_size 32"),
    ],
)
def test_parts_that_do_not_fit_together(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Config(**settings)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_is_positive(temperature: float) -> None:
    with pytest.raises(UsageError, match="temperature must be positive"):
        Confidence(temperature)


def test_a_class_is_found_by_either_of_its_names() -> None:
    config = Config(Architecture(classes=2), labels=("cat", "dog"), class_ids=("n01", "n02"))
    assert config.class_index() == {"cat": 0, "dog": 1, "n01": 0, "n02": 1}
    assert Config(Architecture(classes=2), labels=("cat", "dog")).class_index() == {"cat": 0, "dog": 1}


def test_other_weights_lose_what_was_measured_of_the_old_ones() -> None:
    config = bundle.read_config(bundle.find("cifar10"))
    bare = config.unmeasured()
    assert (bare.exit.calibration, bare.confidence, bare.metrics, bare.division) == (None, None, {}, None)
    assert bare.provenance["started_from"] == config.name
    assert bare.architecture == config.architecture


def test_a_file_of_today_has_every_field_and_one_without_the_optional_ones_has_their_defaults() -> None:
    data = json.loads(Config().to_json())
    assert set(data) == set(Config.__dataclass_fields__)
    assert Config.from_json('{"schema_version": 2}') == Config()
    assert Setting(3, 1.5).integration == Integration(1.5, 3)
