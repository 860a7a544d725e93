"""Small models that the tests share: real graphs of a random ODE-ViT, made once a session."""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from odevit_serve.train.model import ODEViT

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job, and by all that it starts
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads that wait for each other cost more than they give
# Real weights and images, where a developer has them.
DATA = Path(os.environ.get("ODEVIT_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """A command that a test runs in this process sends log lines to a stream that is closed after it."""
    loggers = [logging.getLogger(name) for name in ("odevit_serve", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def real_data() -> Path:
    if not DATA.is_dir():
        pytest.skip("needs the real teacher and data sets, which are not part of the repository")
    return DATA


def tiny_model(**settings: object) -> ODEViT:
    """A random model whose answers change along the way, so that images exit at different depths."""
    return copy.deepcopy(_tiny_model(**settings))  # type: ignore[arg-type]


@functools.cache
def _tiny_model(
    solver: str = "euler",
    splitting: str = "parallel",
    attention: str = "dot",
    convolution: int = 3,
    steps: int = 8,
    seed: int = 0,
    calibrated: bool = True,
    classes: int = 5,
    stem: str = "patch",
) -> ODEViT:
    import torch

    from odevit_serve.config import Architecture, Config, ExitPolicy, Integration, Preprocessing
    from odevit_serve.train.model import ODEViT

    torch.manual_seed(seed)
    config = Config(
        Architecture(16, 4, 24, 3, 2.0, classes, registers=2, attention=attention, convolution=convolution, stem=stem),
        Integration(4.0, steps, solver, splitting),
        Preprocessing((3, 16, 16)),
        labels=("ant", "bee", "cat", "dog", "eel", "fox")[:classes] if classes < 7 else (),
        name="random",
        license="cc0-1.0",
    )
    model = ODEViT(config).eval()
    with torch.no_grad():
        model.head.weight.normal_()
        for norm in (model.psi.attention.norm, model.psi.mlp.norm):  # so that folding has something to fold
            norm.weight.add_(torch.randn_like(norm.weight) * 0.2)
            norm.bias.normal_(std=0.1)
        images = torch.randn(64, 3, 16, 16)
        points = list(model.trajectory(model.stem(images)))
        states = torch.stack([model.stem(images)[:, 0], *(p.state[:, 0] for p in points)])
        travel = (states[-1] - states).norm(dim=-1).mean(1)
    if calibrated:
        policy = ExitPolicy("travel", 0.12, travel=tuple(travel.tolist()), horizon=4.0)
        model.config = config.replace(exit=policy)
    return model


def tiny_folder(folder: Path, **settings: object) -> Path:
    """A bundle of `tiny_model(**settings)` with its graphs."""
    from odevit_serve.export import parts

    tiny_model(**settings).save_pretrained(folder)
    parts(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_bundles(solver="ab2", splitting="lie")`: bundles of other settings, each made once."""

    @functools.cache
    def make(**settings: object) -> Path:
        return tiny_folder(tmp_path_factory.mktemp("tiny"), **settings)

    return make


@pytest.fixture(scope="session")
def tiny_files(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Single files of the tiny bundle, by format."""
    from odevit_serve.export import job

    folder = tmp_path_factory.mktemp("files")
    made = {}
    for kind in ("onnx", "onnx-adaptive"):
        made[kind] = folder / f"{kind}.onnx"
        settings = job.Settings(format=kind, output=str(made[kind]), with_attention=kind == "onnx")
        job.export(str(tiny_bundle), settings)
    return made


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing is what exports take time for: a module of the same weights and settings is traced once a session."""
    from odevit_serve.export import pieces

    trace = pieces.trace

    def remember(module: nn.Module, *arguments: object) -> onnx.ModelProto:
        weights = hashlib.sha256()
        for name, value in module.state_dict().items():
            weights.update(name.encode() + value.numpy().tobytes())
        key = (type(module), module.folded.attention.tied, weights.digest())
        if key not in TRACED:
            TRACED[key] = trace(module, *arguments)
        return copy.deepcopy(TRACED[key])

    monkeypatch.setattr(pieces, "trace", remember)


TRACED: dict[object, onnx.ModelProto] = {}
