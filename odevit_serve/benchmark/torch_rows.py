"""The rows of the benchmark that need torch: the exported files, and plain ViTs to compare with."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx  # noqa: F401  (asked for here, so that its absence is told once)
import torch
from safetensors.torch import load_file, save_file

from .. import bundle, costs
from ..config import Config, ExitPolicy, TeacherFacts
from ..data import images
from ..errors import UserError
from ..export import parts
from ..export.job import Settings, export
from ..runtime.model import BundleModel, load_bundle
from ..runtime.results import Prediction
from ..train.model import ODEViT
from ..train.presets import PRESETS
from ..train.run import silent
from .compare import Array, BenchmarkPlan, PassResult, Say, System, bundle_systems, graph_system, in_batches, interleave

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer


def systems(
    folder: Path,
    config: Config,
    plan: BenchmarkPlan,
    data: str | None,
    teacher_weights: Path | None,
    threads: int,
    scratch: Path,
    left_out: list[str],
    say: Say,
) -> list[System]:
    """The model's other forms, then the ViTs."""
    torch.set_num_threads(threads)
    found: list[System] = []
    forms = {"onnx": Settings(format="onnx"), "onnx-adaptive": Settings(format="onnx-adaptive")}
    if data:
        forms["onnx, int8"] = Settings(format="onnx", precision="int8", calibration=data, max_drop=100.0)
    else:
        left_out.append("int8: it is calibrated on pictures (--data).")
    if not config.exit.travel:
        del forms["onnx-adaptive"]
    for name, settings in forms.items():
        say(f"export: {name}")
        target = scratch / f"{len(found)}.onnx"
        try:
            with quiet():
                export(str(folder), dataclasses.replace(settings, output=str(target)))
        except UserError as error:
            left_out.append(f"{name}: {error}.")
            continue
        found.append(graph_system(f"this model, {name}", target, config, threads))
    try:
        import timm  # noqa: F401
    except ImportError:
        left_out.append("Plain ViTs: timm is not installed (pip install 'odevit-serve[train]').")
        return found
    for name, shape in vits(config, left_out).items():
        file = teacher_weights if shape is config.teacher else None
        found += _vit_systems(name, shape, config, plan, file, threads, scratch, left_out, say)
    return found


def vits(config: Config, left_out: list[str]) -> dict[str, TeacherFacts]:
    """The shapes to compare with: the teacher's, and 12 layers of the model's own width."""
    own = config.architecture
    equal = TeacherFacts("", 12, own.width, own.heads, 4.0)
    taught = config.teacher
    if taught is None:
        left_out.append("A ViT of the teacher's size: the model has none.")
        return {"timm ViT of equal width": equal}
    same = (taught.layers, taught.width, taught.heads, taught.mlp_ratio) == (12, own.width, own.heads, 4.0)
    if same:
        left_out.append("A ViT of equal width beside the teacher's: they are of one shape.")
        return {"timm ViT of the teacher's size": taught}
    return {"timm ViT of the teacher's size": taught, "timm ViT of equal width": equal}


def build_vit(shape: dict[str, Any]) -> VisionTransformer:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**shape).eval()


def open_vit(path: Path, shape: dict[str, Any], threads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Answers pixels with logits."""
    torch.set_num_threads(threads)
    vit = build_vit(shape)
    vit.load_state_dict(load_file(path))

    def answer(pixels: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            logits: np.ndarray = vit(torch.from_numpy(pixels)).numpy()
            return logits

    return answer


def _vit_systems(
    name: str,
    shape: TeacherFacts,
    config: Config,
    plan: BenchmarkPlan,
    file: Path | None,
    threads: int,
    scratch: Path,
    left_out: list[str],
    say: Say,
) -> list[System]:
    own = config.architecture
    words: dict[str, Any] = {
        "img_size": own.image_size, "patch_size": own.patch_size, "in_chans": own.channels, "embed_dim": shape.width,
        "depth": shape.layers, "num_heads": shape.heads, "mlp_ratio": shape.mlp_ratio, "num_classes": own.classes,
    }  # fmt: skip
    torch.manual_seed(0)
    vit, macs = build_vit(words), float(costs.teacher_macs(shape, own))
    if file is not None:
        from ..train.recipe import Teaching
        from ..train.teacher_sources import load_teacher

        vit, name = load_teacher(Teaching(weights=str(file)), own).vit.eval(), "the teacher"
        words["init_values"] = 1.0 if any(".ls1." in key for key in vit.state_dict()) else None
    weights, graph = scratch / f"{name}.safetensors", scratch / f"{name}.onnx"
    save_file({k: v.contiguous() for k, v in vit.state_dict().items()}, weights)
    say(f"export: {name}")
    with quiet():
        example = torch.zeros(2, own.channels, own.image_size, own.image_size)
        program: Any = torch.onnx.export(
            vit, (example,), dynamo=True, opset_version=20, input_names=["x"], verbose=False,
            dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1)}},
        )  # fmt: skip
        program.save(graph)
    in_onnx = graph_system(name, graph, config, threads, macs)
    in_onnx.cost["random"] = file is None
    cost = {"kind": "torch", "path": weights, "vit": words, "random": file is None}
    found = [in_onnx, System(name, "torch eager", _in_torch(vit), lambda steps: macs, (weights,), cost)]
    if not plan.compiled:
        left_out.append(f"{name}, torch compiled: left out by --quick.")
        return found
    say(f"compile: {name}")
    for batch in plan.batches:
        try:
            with quiet():
                run = _in_torch(torch.compile(vit))
                run(np.zeros((batch, *config.preprocessing.input_size), np.float32), batch)
        except Exception as error:  # no compiler, or whatever else its many parts can meet
            left_out.append(f"{name}, torch compiled: {(str(error).strip().splitlines() or ['failed'])[0]}.")
            break
        where = "torch compiled"
        found.append(System(name, where, run, lambda steps: macs, (weights,), {}, only=batch))
    return found


def teacher_time(folder: Path, teacher: TeacherFacts, scratch: Path, images: int = 16, rounds: int = 9) -> float:
    """What one image costs the teacher in onnxruntime, in full depths of the bundle; both on one thread, in turns."""
    model = load_bundle(folder, threads=1)
    own, *_ = bundle_systems(model, 1)
    vit, *_ = _vit_systems(
        "teacher", teacher, model.config, BenchmarkPlan(compiled=False), None, 1, scratch, [], silent
    )
    pixels = np.random.default_rng(0).standard_normal((images, *model.config.preprocessing.input_size), np.float32)
    found = interleave({"own": lambda: own.run(pixels, 1), "teacher": lambda: vit.run(pixels, 1)}, rounds, silent)
    seconds = {name: statistics.median(took for took, _ in runs) for name, runs in found.items()}
    return seconds["teacher"] / seconds["own"]


def _in_torch(vit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Array, int], PassResult]:
    def call(pixels: Array) -> tuple[Array, Array | None]:
        with torch.inference_mode():
            return vit(torch.from_numpy(pixels)).numpy(), None

    return lambda pixels, batch: in_batches(call, pixels, batch)


def grown(config: Config, count: int, threads: int, scratch: Path) -> dict[int, BundleModel]:
    """Models of the same block with random weights and larger and smaller pictures, by their tokens."""
    own, found = config.architecture, {}
    for grid in np.unique(np.geomspace(max(2, own.grid / 2), 2 * own.grid, count).round().astype(int)).tolist():
        side = grid * own.patch_size
        shape = dataclasses.replace(own, image_size=side)
        words = dataclasses.replace(config.preprocessing, input_size=(own.channels, side, side))
        folder = scratch / f"grid-{grid}"
        with quiet():
            ODEViT(config.replace(architecture=shape, preprocessing=words)).save_pretrained(folder)
            parts(folder)
        found[shape.tokens] = load_bundle(folder, threads=threads)
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Exporters talk on stdout, by warnings and by logging; a benchmark has a table of its own to print."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def random_bundle(folder: Path, pictures: Sequence[bytes]) -> Path:
    """The preset `tiny` with random weights, and an exit policy under which pictures end at many depths."""
    torch.manual_seed(0)
    model = ODEViT(PRESETS["tiny"]).eval()
    with torch.no_grad():
        model.head.weight.normal_()
        pixels = torch.stack(
            [torch.from_numpy(images.prepare(images.read(p), model.config.preprocessing)) for p in pictures]
        )
        points = list(model.trajectory(model.stem(pixels)))
        states = torch.stack([model.stem(pixels)[:, 0], *(p.state[:, 0] for p in points)])
        travel = (states[-1] - states).norm(dim=-1).mean(1)
    policy = ExitPolicy("travel", 1.0, travel=tuple(travel.tolist()), horizon=model.config.integration.horizon)
    model.config = dataclasses.replace(model.config, exit=policy, name="random-tiny")
    model.save_pretrained(folder)
    parts(folder)
    loaded = load_bundle(folder)
    scores = np.array([_scores(p) for p in loaded.predict(list(pictures), adaptive=False, trace=True)])  # [B,N]
    candidates = np.geomspace(1e-4, 100, 400)
    mean = [np.where((scores >= c).any(1), (scores >= c).argmax(1) + 1, scores.shape[1]).mean() for c in candidates]
    chosen = candidates[int(np.argmin(np.abs(np.array(mean) - scores.shape[1] / 2)))]
    bundle.write_config(folder, loaded.config.replace(exit=dataclasses.replace(policy, threshold=float(chosen))))
    return folder


def _scores(prediction: Prediction) -> list[float]:
    return [step.margin / max(step.travel or 0.0, 1e-12) for step in prediction.trace]
