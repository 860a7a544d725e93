"""What the benchmark compares with: ViTs of the right shapes, models of other sizes, a random model that exits."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from odevit_serve import bundle, load
from odevit_serve.benchmark.pictures import some_pictures
from odevit_serve.benchmark.torch_rows import build_vit, grown, open_vit, quiet, random_bundle, teacher_time, vits
from odevit_serve.config import Architecture, Config, TeacherFacts

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}


def test_which_vits_it_is_compared_with() -> None:
    shape, said = Architecture(width=192, heads=3), list[str]()
    assert list(vits(Config(shape), said)) == ["timm ViT of equal width"]
    same = vits(Config(shape, teacher=TeacherFacts("t", 12, 192, 3, 4.0)), said)
    assert list(same) == ["timm ViT of the teacher's size"]
    assert len(said) == 2
    larger = TeacherFacts("t", 24, 384, 6, 4.0)
    both = vits(Config(shape, teacher=larger), said)
    assert both["timm ViT of the teacher's size"] is larger
    equal = both["timm ViT of equal width"]
    assert (equal.width, equal.heads, equal.layers) == (192, 3, 12)
    assert len(said) == 2  # nothing is left out


def test_a_vit_from_its_file_answers_as_the_one_that_was_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vit = build_vit(VIT)
    save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    pixels = np.random.default_rng(0).normal(size=(3, 3, 16, 16)).astype(np.float32)
    threads = torch.get_num_threads()
    try:
        found = open_vit(tmp_path / "vit.safetensors", VIT, 1)(pixels)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    with torch.no_grad():
        np.testing.assert_allclose(found, vit(torch.from_numpy(pixels)).numpy(), atol=1e-5)


def test_a_model_of_another_picture_size_has_the_tokens_it_is_known_by(tiny_bundle: Path, tmp_path: Path) -> None:
    own = bundle.read_config(tiny_bundle).architecture
    ((tokens, model),) = grown(bundle.read_config(tiny_bundle), 1, 1, tmp_path).items()  # the smallest: half the grid
    shape = model.config.architecture
    assert tokens == shape.tokens == model.graphs.state_shape[0] == 1 + (own.grid // 2) ** 2 + own.registers
    assert (shape.width, shape.patch_size, shape.image_size) == (own.width, own.patch_size, own.image_size // 2)
    assert model.predict(np.zeros((16, 16, 3), np.uint8), adaptive=False).steps == 8


def test_a_teacher_is_timed_beside_the_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    time = teacher_time(tiny_bundle, TeacherFacts("t", 2, 24, 3, 4.0), tmp_path, images=2, rounds=1)
    assert 0 < time < 100


def test_pictures_end_at_many_depths_in_a_random_model(tmp_path: Path) -> None:
    pictures = some_pictures(40, 32)
    model = load(random_bundle(tmp_path / "random", pictures), threads=1)
    steps = [answer.steps for answer in model.predict(pictures)]
    full = model.config.integration.steps
    assert len(set(steps)) >= 4
    assert np.mean(steps) == pytest.approx(full / 2, abs=full / 10)
    assert model.guarantee is None


def test_quiet_holds_back_what_exporters_say_and_no_longer(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = logging.root.manager.disable

    def chatter() -> None:
        print("printed")
        logging.getLogger("torch").warning("logged")
        warnings.warn("warned", stacklevel=1)

    @quiet()
    def fails() -> None:
        chatter()
        raise KeyError

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(KeyError):
            fails()
        assert (capsys.readouterr().out, caplog.records, caught) == ("", [], [])
        chatter()
    assert capsys.readouterr().out == "printed\n"
    assert [record.message for record in caplog.records] == ["logged"]
    assert [str(warning.message) for warning in caught] == ["warned"]
    assert logging.root.manager.disable == before
