"""Embeddings are the CLS state at the exit, whatever the batch, and files hold them as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from odevit_serve import load as load_model
from odevit_serve.errors import UsageError
from odevit_serve.runtime import embeddings
from odevit_serve.runtime.embeddings import Embedding
from odevit_serve.runtime.results import Failure
from odevit_serve.train.model import ODEViT

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pictures")
    for i in range(40):
        coarse = Image.fromarray(RNG.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((16, 16), Image.Resampling.BICUBIC).save(place / f"{i:02}.png")
    return place


@pytest.mark.parametrize("settings", [{}, {"solver": "ab2", "splitting": "strang"}])
@torch.no_grad()
def test_they_are_the_states_of_the_trajectory(settings: dict[str, str], pictures: Path, tiny_bundles: object) -> None:
    folder = tiny_bundles(**settings)  # type: ignore[operator]
    own, model = ODEViT.from_pretrained(folder), embeddings.load(folder)
    paths = sorted(pictures.iterdir())
    found = list(model.embed(paths))
    assert len({one.prediction.steps for one in found if isinstance(one, Embedding)}) > 1  # they exit at several depths
    answers = load_model(folder).predict(paths)
    for path, one, answer in zip(paths, found, answers, strict=True):
        assert isinstance(one, Embedding)
        assert (one.prediction.label, one.prediction.steps) == (answer.label, answer.steps)
        state = own.stem(torch.from_numpy(model.prepare(path))[None])
        states = [state, *(point.state for point in own.trajectory(state))]
        assert np.allclose(one.vector, states[answer.steps][0, 0].numpy(), atol=1e-4)
    full = list(model.embed(paths[:3], adaptive=False))
    assert all(isinstance(one, Embedding) and one.prediction.steps == 8 for one in full)


def run(*words: object, hide: str = "") -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys\nfor name in {hide.split()!r}: sys.modules[name] = None\nfrom odevit_serve.cli import main; main()"
    )
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)


def test_files(pictures: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    from pyarrow import parquet

    lean = "torch timm transformers pyarrow"
    done = run("embed", pictures, "-m", tiny_bundle, "-o", tmp_path / "e.npz", hide=lean)
    assert done.returncode == 0, done.stderr
    assert "40 vectors of 24 numbers are in" in done.stderr
    known = np.load(tmp_path / "e.npz")
    expected = list(embeddings.load(tiny_bundle).embed(sorted(pictures.iterdir())))
    assert np.array_equal(known["embeddings"], np.stack([one.vector for one in expected]))  # type: ignore[union-attr]
    assert known["sources"].tolist() == sorted(map(str, pictures.iterdir()))
    done = run("embed", pictures, "-m", tiny_bundle, "-o", tmp_path / "e.parquet")
    assert done.returncode == 0, done.stderr
    table = parquet.read_table(tmp_path / "e.parquet")
    assert table.column_names == ["source", "embedding", "label", "probability", "steps"]
    assert np.array_equal(np.array(table["embedding"].to_pylist(), np.float32), known["embeddings"])
    assert table["steps"].to_pylist() == known["steps"].tolist()


def test_bad_input(pictures: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"")
    done = run("embed", broken, pictures / "00.png", "-m", tiny_bundle, "-o", tmp_path / "e.npz")
    assert done.returncode == 1
    assert f"{broken} is empty" in done.stderr
    assert len(np.load(tmp_path / "e.npz")["sources"]) == 1  # the other one is there all the same
    for words, code, message in (
        (["-o", tmp_path / "e.txt"], 2, "e.txt ends in neither .npz nor .parquet"),
        (["-o", tmp_path / "e.npz", "--rule", "guess"], 2, "unknown rule 'guess'"),
        (["-o", broken / "e.npz"], 1, "cannot be written"),
        (["-o", tmp_path / "e.npz", "-m", "nothing"], 1, "no model 'nothing'"),
    ):
        done = run("embed", pictures / "00.png", "-m", tiny_bundle, *words)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
        assert message in done.stderr
    done = run("embed", pictures / "00.png", "-m", tiny_bundle, "-o", tmp_path / "e.parquet", hide="pyarrow")
    assert done.returncode == 1
    assert "pip install 'odevit-serve[parquet]'" in done.stderr
    single = tmp_path / "single.onnx"
    os.link(tiny_bundle / "step.onnx", single)
    with pytest.raises(UsageError, match="is a single file and gives no state"):
        embeddings.load(single)
    assert isinstance(next(embeddings.load(tiny_bundle).embed([broken])), Failure)
