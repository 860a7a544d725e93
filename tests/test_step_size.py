"""Step sizes by an error estimate: what it says of closed-form flows, and what the graphs and the slots make of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odevit_serve import bundle, step_size
from odevit_serve.config import Integration
from odevit_serve.errors import UsageError
from odevit_serve.runtime import exits
from odevit_serve.runtime.exits import ExitReason
from odevit_serve.runtime.model import load, load_bundle
from odevit_serve.runtime.sessions import Graphs
from odevit_serve.runtime.slots import Job, Outcome, Slots

IMAGES = np.random.default_rng(5).normal(size=(24, 3, 16, 16)).astype(np.float32)
PICTURES = [(image.transpose(1, 2, 0) * 40 + 128).clip(0, 255).astype(np.uint8) for image in IMAGES]
TURN = np.array([[0.0, -1.0], [1.0, 0.0]])  # x' = TURN x goes round in a circle


def exact(x: np.ndarray, t: float) -> np.ndarray:
    return np.array([[math.cos(t), -math.sin(t)], [math.sin(t), math.cos(t)]]) @ x


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_the_estimate_tends_to_the_error_of_a_step_of_euler(ratio: float) -> None:
    """On a circle; and the embedded Heun pair, h/2 |f(x + h v) - v| for one more evaluation, tends to the same."""
    x, gaps = np.array([1.0, 0.0]), []
    for h in (0.2, 0.1, 0.05):
        before, v = h / ratio, TURN @ x
        change = np.linalg.norm(v - TURN @ exact(x, -before))
        error = np.linalg.norm(x + h * v - exact(x, h))
        pair = 0.5 * h * np.linalg.norm(TURN @ (x + h * v) - v)
        gaps.append([abs(step_size.estimate(change, h, before) / error - 1), abs(pair / error - 1)])
    assert max(gaps[-1]) < 0.02
    assert all(late < 0.6 * early for early, late in zip(gaps[0], gaps[-1]))


@given(*[st.floats(1e-4, 1e4)] * 3, st.integers(1, 40), st.integers(1, 40))
def test_a_size_is_whole_within_the_tolerance_and_the_largest_such(
    change: float, before: float, tolerance: float, steps: int, left: int
) -> None:
    grid = 12.0 / steps
    size = float(step_size.choose(change, before, tolerance, grid, left * grid))
    count = round(size / grid)
    assert size == pytest.approx(count * grid)
    assert 1 <= count <= left
    if count > 1:
        assert step_size.estimate(change, size, before) <= tolerance * (1 + 1e-9)
    if count < left:
        assert step_size.estimate(change, size + grid, before) >= tolerance * (1 - 1e-9)


def test_the_first_step_and_a_tolerance_of_nothing_are_steps_of_the_grid() -> None:
    assert step_size.choose(1.0, 0.0, 1e9, 0.5, 4.0) == 0.5
    assert step_size.choose(0.0, 0.5, 0.0, 0.5, 4.0) == 0.5
    assert step_size.choose(0.0, 0.5, 1e-6, 0.5, 4.0) == 4.0  # a straight line
    assert np.isnan(step_size.estimate(1.0, 0.5, 0.0))


def adaptive(folder: Path, tolerance: float, solver: str = "euler") -> Graphs:
    return Graphs(folder, bundle.read_config(folder), solver=solver, tolerance=tolerance)


def run(slots: Slots, jobs: list[Job], gulp: int = 99) -> dict[Any, Outcome]:
    ended: dict[Any, Outcome] = {}
    while jobs or slots.active:
        count = min(gulp, slots.free)
        taken, jobs = jobs[:count], jobs[count:]
        if taken:
            slots.admit(np.stack([IMAGES[job.key] for job in taken]), taken)
        ended |= {outcome.job.key: outcome for outcome in slots.step()}
    return ended


@pytest.mark.parametrize("solver", ["euler", "ab2"])
def test_the_slots_follow_the_definition(tiny_bundle: Path, solver: str) -> None:
    """Each image by hand in torch, one at a time: sizes, answers and the estimates in the trace."""
    torch = pytest.importorskip("torch")
    from odevit_serve.train.model import ODEViT

    model, tolerance, steps = ODEViT.from_pretrained(tiny_bundle), 0.05, 8
    graphs = adaptive(tiny_bundle, tolerance, solver)
    depth = exits.resolve(graphs.config, adaptive=False)
    assert depth.tolerance == tolerance
    found = run(Slots(graphs, 7), [Job(i, depth, trace=True) for i in range(12)], gulp=3)
    grid, seen = graphs.config.integration.step_size, set()
    with torch.no_grad():
        for i in range(12):
            x = model.stem(torch.from_numpy(IMAGES[i : i + 1]))
            place, before, last, sizes, errors = 0, 0.0, None, [], []
            while place < steps:
                v = model.psi(x)
                change = 0.0 if last is None else float((v - last)[0, 0].norm())
                h = float(step_size.choose(change, before, tolerance, grid, (steps - place) * grid))
                turn = 0 if solver == "euler" or last is None else 0.5 * h / before * (v - last)
                x = x + h * (v + turn)
                sizes.append(h)
                errors.append(float(step_size.estimate(change, h, before)))
                place, before, last = place + round(h / grid), h, v
            outcome = found[i]
            assert [step.step_size for step in outcome.trace] == pytest.approx(sizes)
            np.testing.assert_allclose([step.error for step in outcome.trace], errors, rtol=1e-3)
            np.testing.assert_allclose([step.time for step in outcome.trace], np.cumsum(sizes))
            np.testing.assert_allclose(outcome.logits, model.answer(x)[0].numpy(), atol=2e-4)
            assert (outcome.steps, outcome.reason) == (len(sizes), ExitReason.HORIZON)
            seen.add(tuple(sizes))
    assert len(seen) > 1  # images do differ in their sizes


def test_a_tolerance_of_nothing_is_the_grid(tiny_bundle: Path) -> None:
    graphs, plain = adaptive(tiny_bundle, 1.0), Graphs(tiny_bundle, bundle.read_config(tiny_bundle))
    depth = exits.resolve(plain.config, tolerance=0.0)
    found = run(Slots(graphs, 8), [Job(i, depth) for i in range(24)])
    wanted = run(Slots(plain, 8), [Job(i, depth) for i in range(24)])
    for i in range(24):
        assert (found[i].steps, found[i].reason) == (wanted[i].steps, wanted[i].reason)
        np.testing.assert_allclose(found[i].logits, wanted[i].logits, atol=1e-5)


def test_sizes_do_not_depend_on_batch_mates_and_survive_parking(tiny_bundle: Path) -> None:
    graphs = adaptive(tiny_bundle, 0.05)
    depths = [exits.resolve(graphs.config, adaptive=False, tolerance=t, steps=n) for t in (0.02, 0.1) for n in (8, 16)]
    jobs = [Job(i, depths[i % 4]) for i in range(24)]
    together = run(Slots(graphs, 9), jobs, gulp=4)
    for job in jobs:
        alone = run(Slots(graphs, 1), [job])[job.key]
        assert (alone.steps, alone.logits.argmax()) == (together[job.key].steps, together[job.key].logits.argmax())
        np.testing.assert_allclose(alone.logits, together[job.key].logits, atol=1e-4)
    early = replace(depths[0], max_steps=2)
    slots = Slots(graphs, 4)
    parked = run(slots, [Job(0, early, park=True)])[0]
    assert (parked.steps, parked.reason) == (2, ExitReason.BUDGET)
    slots.resume(parked.parked, Job(0, depths[0]))
    found = run(slots, [])[0]
    assert found.steps == together[0].steps
    np.testing.assert_allclose(found.logits, together[0].logits, atol=1e-4)


def test_evaluations_are_counted(tiny_bundle: Path) -> None:
    model = load_bundle(tiny_bundle)
    few = model.predict(PICTURES[0], adaptive=False, tolerance=5.0)
    assert (few.steps, few.full_steps, few.evaluations) == (2, 8, 2)
    assert model.predict(PICTURES[0], adaptive=False, solver="heun").evaluations == 16
    assert few.to_dict()["evaluations"] == 2
    assert not few.guaranteed


def test_other_solvers_and_numbers_are_refused(tiny_bundle: Path, tiny_files: dict[str, Path]) -> None:
    model, picture = load_bundle(tiny_bundle), PICTURES[0]
    with pytest.raises(UsageError, match="needs the solver euler or ab2"):
        model.predict(picture, solver="heun", tolerance=1.0)
    with pytest.raises(UsageError, match="0 or more"):
        model.predict(picture, tolerance=-1.0)
    with pytest.raises(UsageError, match="graphs of its own"):
        model.depth(tolerance=1.0)
    with pytest.raises(UsageError, match="exported with the tolerance 0"):
        load(tiny_files["onnx-adaptive"]).predict(picture, tolerance=1.0)
    assert Integration(12.0, 4, tolerance=2.0).by("heun").tolerance == 0  # not asked for: dropped
    assert Integration(12.0, 4, tolerance=2.0).by("ab2").tolerance == 2.0


@pytest.mark.parametrize("solver", ["euler", "ab2"])
def test_a_file_ends_images_as_the_runtime_does(tiny_bundle: Path, tmp_path: Path, solver: str) -> None:
    from odevit_serve.export import job

    target = tmp_path / f"{solver}.onnx"
    settings = job.Settings(format="onnx-adaptive", tolerance=0.05, solver=solver, output=str(target))
    job.export(str(tiny_bundle), settings)  # which compares depths with the runtime at batch 1, 3 and 8
    file, own = load(target), load_bundle(tiny_bundle)
    asked: dict[str, Any] = {"tolerance": 0.05, "solver": solver}
    found = [(p.steps, p.exit, p.index) for p in file.predict(PICTURES)]
    assert found == [(p.steps, p.exit, p.index) for p in own.predict(PICTURES, **asked)]
    full = [(p.steps, p.index) for p in file.predict(PICTURES, threshold=math.inf)]
    assert full == [(p.steps, p.index) for p in own.predict(PICTURES, adaptive=False, **asked)]
    assert len({steps for steps, _ in full}) > 1


def test_the_masked_loop_gives_the_same(tiny_bundle: Path) -> None:
    import onnxruntime

    from odevit_serve.export.formats.onnx_adaptive import adaptive_graph
    from odevit_serve.runtime.graphs import Parts

    config = bundle.read_config(tiny_bundle)
    config = config.replace(integration=replace(config.integration, tolerance=0.05))
    parts, answers = Parts.of(tiny_bundle, config), []
    for compact in (True, False):
        graph = adaptive_graph(parts, config, compact).SerializeToString()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        answers.append(onnxruntime.InferenceSession(graph, options).run(None, {"pixel_values": IMAGES}))
    np.testing.assert_allclose(answers[0][0], answers[1][0], atol=1e-4)
    np.testing.assert_array_equal(answers[0][1:], answers[1][1:])


def test_what_cannot_be_exported_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    from odevit_serve.export import job

    with pytest.raises(UsageError, match="--tolerance does not apply to the format onnx"):
        job.export(str(tiny_bundle), job.Settings(tolerance=0.05, output=str(tmp_path / "a.onnx")))
    with pytest.raises(UsageError, match="needs --precision fp32"):
        job.export(str(tiny_bundle), job.Settings("onnx-adaptive", tolerance=0.05, precision="fp16"))


@pytest.fixture(scope="module")
def calibrated(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, np.ndarray]:
    """A bundle with a proof for a tolerance, what `calibrate` said, and the images."""
    from PIL import Image

    from odevit_serve.data.datasets import Images
    from odevit_serve.guarantee.calibrate import calibrate

    values = np.random.default_rng(0).integers(0, 256, (300, 16, 16, 3), np.uint8)
    images = Images([str(i) for i in range(300)], None, (), lambda i: Image.fromarray(values[i]), True)
    output = tmp_path_factory.mktemp("sized") / "bundle"
    with pytest.raises(UsageError, match="give --output"):
        calibrate(tiny_bundle, images, 0.1, 0.1, tolerance=0.05)
    report = calibrate(tiny_bundle, images, 0.1, 0.1, rule="margin", output=output, tolerance=0.05)
    return output, report, values


def test_the_proof_is_for_the_tolerance(calibrated: tuple[Path, Any, np.ndarray], tiny_bundle: Path) -> None:
    folder, report, values = calibrated
    proof = report.policy.calibration
    assert (proof.setting.tolerance, proof.setting.steps) == (0.05, 8)
    assert proof.mean_steps < 8
    assert [rival.name for rival in report.rivals][-1] == "fixed, 8 steps"
    model = load_bundle(folder)
    assert model.config.integration.tolerance == 0.05
    pictures = list(values)
    early, full = model.predict(pictures), model.predict(pictures, adaptive=False)
    assert all(p.guaranteed for p in early + full)
    for tolerance in (0.06, 0.0):
        assert not any(p.guaranteed for p in model.predict(pictures[:3], tolerance=tolerance))
    assert not any(p.guaranteed for p in load_bundle(tiny_bundle).predict(pictures[:3], tolerance=0.05))
    order = np.random.default_rng(0).permutation(300)[60:]  # those that tested
    assert np.mean([early[i].index != full[i].index for i in order]) == pytest.approx(proof.observed)
    assert np.mean([early[i].steps for i in order]) == pytest.approx(proof.mean_steps)
    assert "where the estimated error of CLS is at most 0.05" in (folder / "README.md").read_text()


def test_served(calibrated: tuple[Path, Any, np.ndarray]) -> None:
    """The engine gives what predict gives."""
    from odevit_serve.serving.engine import Engine

    folder, _, values = calibrated
    model = load_bundle(folder)
    wanted = model.predict(list(values[:100]))
    with Engine(model, slots=8) as engine:
        found = [future.result().prediction for future in [engine.submit(v) for v in values[:100]]]
    assert [(p.steps, p.index, p.guaranteed) for p in found] == [(p.steps, p.index, True) for p in wanted]


def test_the_command(tiny_bundle: Path, tmp_path: Path) -> None:
    import json

    from PIL import Image
    from typer.testing import CliRunner

    from odevit_serve.cli import app

    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    words = ["predict", str(tmp_path / "red.png"), "-m", str(tiny_bundle), "--no-adaptive", "--json"]
    found = CliRunner().invoke(app, [*words, "--tolerance", "5"])
    assert json.loads(found.stdout)[0]["evaluations"] == 2
