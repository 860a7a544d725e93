"""The command from beginning to end: a report that stands alone, resumed rather than repeated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from odevit_serve import cli
from odevit_serve.train.analysis import collect as module
from odevit_serve.train.analysis import figures, lyapunov


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "some.npz"
    x = random.integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    np.savez(path, x_test=x, y_test=np.arange(40) % 5, classes=np.array(["ant", "bee", "cat", "dog", "eel"]))
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["analyze", *map(str, words)])


@pytest.fixture(scope="module")
def made(tiny_bundle: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "report"
    done = run(tiny_bundle, "--data", data, "--quick", "--limit", 24, "-o", folder)
    assert done.exit_code == 0, done.output
    return folder


def test_the_report_stands_alone(made: Path) -> None:
    page = (made / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    numbers = json.loads((made / "numbers.json").read_text())
    assert numbers["images"] == 24
    measured = {"depth", "stability", "distance", "steepness", "exits", "attention", "energy", "tokens"}
    assert set(numbers["sections"]) == measured
    assert "Left out. No teacher was given" in page
    names = {path.stem for path in made.glob("*.png")}
    assert names == set(figures.DRAWN) - {"distance-to-teacher"}
    assert page.count("data:image/png;base64,") == len(names)


def test_numbers_are_those_of_the_model(made: Path, tiny_bundle: Path) -> None:
    numbers = json.loads((made / "numbers.json").read_text())
    depth = numbers["sections"]["depth"]
    assert depth["at_own"]["agreement"] == 1  # with itself
    assert depth["at_own"]["accuracy"] == numbers["accuracy"]
    norms = lyapunov.spectral_norms(module.ODEViT.from_pretrained(tiny_bundle).psi)
    assert numbers["sections"]["steepness"]["norms"]["query"] == pytest.approx(norms["query"])
    assert numbers["sections"]["exits"]["accuracy"] == numbers["accuracy"]


def test_energies_and_tokens_are_those_of_the_model(made: Path, tiny_bundle: Path, data: Path) -> None:
    from odevit_serve.train.analysis.energy import energy

    study = module.open_study(str(tiny_bundle), str(data), made, limit=24, quick=True)
    model, kept = study.model, np.load(made / "parts" / "energy.npz")
    pixels = next(study._batches("test", None)).pixel_values
    with torch.no_grad():
        x = model.stem(pixels)
        points = list(model.trajectory(x))
        ends = energy(model.psi.attention, points[-1].state)
        speed = torch.stack([p.velocity.norm(dim=-1) for p in points], 1)
    np.testing.assert_allclose(kept["cls"][:24, -1], ends[..., 0], rtol=1e-4, atol=1e-4)
    assert kept["cls"].shape == (24, 9, model.psi.attention.heads)
    tokens = json.loads((made / "numbers.json").read_text())["sections"]["tokens"]
    slow = speed < 0.5 * speed[:, :1].mean(-1, keepdim=True)
    assert tokens["below"][0] == pytest.approx(slow.float().mean((0, 2)).tolist(), abs=1e-6)
    stays = [slow[:, n:].all(1).float().mean().item() for n in range(8)]
    assert tokens["resting"][0] == pytest.approx(stays, abs=1e-6)


def test_what_is_done_is_not_done_again(
    made: Path, tiny_bundle: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (made / "numbers.json").read_bytes()
    looked = []
    real = module.look_depth
    monkeypatch.setattr(module, "look_depth", lambda study, batch: looked.append(1) or real(study, batch))
    same = [tiny_bundle, "--data", data, "--quick", "--limit", 24, "-o", made]
    (made / "parts" / "entropy.npz").write_bytes(b"cut short")
    done = run(*same)
    assert done.exit_code == 0, done.output
    assert "depth: already there" in done.output
    assert "entropy: already there" not in done.output
    assert not looked
    assert (made / "numbers.json").read_bytes() == before
    other = run(*same[:-3], 20, "-o", made)  # other images: nothing of before fits
    assert other.exit_code == 0
    assert looked
    assert json.loads((made / "numbers.json").read_text())["images"] == 20


def test_with_a_teacher_and_without_labels(tiny_bundle: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=1, num_classes=5)
    save_file(vit.state_dict(), tmp_path / "teacher.safetensors")
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), dtype=np.uint8))
    words = [tiny_bundle, "--data", tmp_path / "x.npz", "--quick", "--limit", 12, "-o", tmp_path / "out", "--json"]
    done = run(*words, "--teacher-weights", tmp_path / "teacher.safetensors")
    assert done.exit_code == 0, done.output
    numbers = json.loads(done.stdout)
    assert numbers["accuracy"] is None
    assert [g["name"] for g in numbers["sections"]["distance"]["groups"]] == ["agree", "differ"]
    assert numbers["sections"]["depth"]["agreement_with"] == "the teacher"
    assert (tmp_path / "out" / "distance-to-teacher.png").stat().st_size > 5000
    assert not (tmp_path / "out" / "exponents-by-class.png").exists()
