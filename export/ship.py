"""From a finished run to a bundled model, in one command for those who build the package:

    python -m odevit_serve.export.ship RUN/bundle NAME --data DATA [--note TEXT] [--teacher NAME --teacher-note TEXT]
        [--teacher-weights FILE [--teacher-size PX --teacher-patch PX]] [--apart GLOB,GLOB] [--full-size DATA]
        [--unsure 0.05] [--license NAME]

It stores the weights as float16, makes the graphs of the runtime, calibrates on the images that training set aside for
that (exits, temperature, and the mark of unsure answers), reads the test images once, times the teacher beside it, and
writes what came out into the card. Where training set none aside, test images calibrate: never those that trained the
model or chose its weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import bundle
from ..benchmark.torch_rows import teacher_time
from ..guarantee.calibrate import calibrate, match_labels, open_images
from ..guarantee.confidence import NoMark
from ..model_card import write_card
from ..train.model import ODEViT
from ..train.recipe import Teaching
from ..train.val import NO_TEACHER, ValidationPlan, validate
from . import install, parts

EPSILON, DELTA, UNSURE = 0.01, 0.05, 0.05
CARD_IMAGES = 4000  # of the test images that other numbers of steps and other solvers are measured on


def ship(
    source: Path,
    folder: Path,
    data: str,
    note: str = "",
    teacher: dict[str, Any] | None = None,
    expert: Teaching = NO_TEACHER,
    apart: Sequence[str] = (),
    full_size: str = "",
    unsure: float | None = UNSURE,
    license: str = "",
) -> None:
    model = ODEViT.from_pretrained(source)
    config = model.config
    facts = dataclasses.replace(config.teacher, **(teacher or {})) if config.teacher else None
    provenance = {**config.provenance, "note": note} if note else config.provenance
    model.config = config.replace(
        name=folder.name, teacher=facts, provenance=provenance, license=license or config.license
    )
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:  # the old bundle stays until all went well
        made = Path(scratch) / folder.name
        model.save_pretrained(made, half=True)
        parts(made)
        prove(made, data, unsure)
        config = bundle.read_config(made)
        if config.teacher:
            time = round(teacher_time(made, config.teacher, Path(scratch)), 2)
            config = config.replace(teacher=dataclasses.replace(config.teacher, time=time))
        measured = measure(made, data, expert, apart, full_size)
        bundle.write_config(made, config.replace(metrics={**config.metrics, **measured}))
        write_card(made)
        install.move(made, folder, Path(scratch))


def prove(folder: Path, data: str, unsure: float | None) -> None:
    """Calibrate a bundle on images that neither trained nor chose it; without a mark where none can be proven."""
    config = bundle.read_config(folder)
    division = config.division
    split = "calibration" if division is not None and division.calibration else "test"
    images = open_images(data, split, division=division)
    words = f"{len(images):,} images of the split {split!r}, seed 0"
    labelled = match_labels(images, config) is not None
    try:
        report = calibrate(folder, images, EPSILON, DELTA, chosen_as=words, unsure=unsure if labelled else None)
    except NoMark as error:
        print(error)
        report = calibrate(folder, images, EPSILON, DELTA, chosen_as=words)
    print("images end by:", report.policy.calibration.exits if report.policy.calibration else {})


def measure(
    folder: Path, data: str, teacher: Teaching, apart: Sequence[str] = (), full_size: str = ""
) -> dict[str, Any]:
    """What the card shows of the held-out split: by steps and by solver in torch, with early exit in the runtime.

    `apart` are patterns of file names that are measured on their own; `full_size` is other data of the same classes.
    """
    own = bundle.read_config(folder).integration
    *_, early = rows = validate(str(folder), data, teacher=teacher)
    full = next(row for row in rows if row["steps"] == own.steps)
    card = validate(str(folder), data, ValidationPlan(card=True), limit=CARD_IMAGES)[:-1]
    longer = [row for row in card if row["horizon"] != own.horizon]
    fixed = [row for row in card if row["horizon"] == own.horizon]
    by_steps = {str(row["steps"]): row for row in fixed if row["solver"] == own.solver}
    by_solver = {row["solver"]: row for row in fixed if row["steps"] == own.steps}
    found: dict[str, Any] = {
        "accuracy_by_steps": _each(by_steps, "accuracy"),
        "accuracy_by_steps_images": card[0]["images"],
        "accuracy_by_solver": _each(by_solver, "accuracy"),
        "as_full_depth_by_steps": _each({n: row for n, row in by_steps.items() if int(n) < own.steps}, "as_full_depth"),
        "test_accuracy": round(full["accuracy"], 4),
        "test_accuracy_top5": round(full["accuracy@5"], 4),
        "test_accuracy_macro": round(full["macro_accuracy"], 4),
        **{f"test_accuracy_horizon_{row['horizon']:g}": round(row["accuracy"], 4) for row in longer},
        "test_accuracy_adaptive": round(early["accuracy"], 4),
        "test_as_full_depth_adaptive": round(early["as_full_depth"], 4),
        "test_mean_steps_adaptive": round(early["steps"], 2),
        "test_images": early["images"],
    }
    if teacher.used:
        found["test_accuracy_teacher"] = round(early["teacher_accuracy"], 4)
    at_full_depth = ValidationPlan([own.steps])
    sets = {glob.strip("-_*"): validate(str(folder), data, at_full_depth, teacher, only=glob)[0] for glob in apart}
    for key, name in (("accuracy", "test_accuracy_by_set"), ("teacher_accuracy", "test_accuracy_teacher_by_set")):
        if sets and key in full:
            found[name] = _each(sets, key)
    if full_size:
        (large,) = validate(str(folder), full_size, at_full_depth, teacher)
        found |= {
            "full_size_accuracy": round(large["accuracy"], 4),
            "full_size_accuracy_top5": round(large["accuracy@5"], 4),
            "full_size_images": large["images"],
        }
        if teacher.used:
            found["full_size_accuracy_teacher"] = round(large["teacher_accuracy"], 4)
    return found


def _each(rows: dict[str, dict[str, Any]], key: str) -> dict[str, float]:
    return {name: round(row[key], 4) for name, row in rows.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("name")
    parser.add_argument("--data", required=True)
    parser.add_argument("--note", default="")
    parser.add_argument("--teacher", default="")
    parser.add_argument("--teacher-note", default="")
    parser.add_argument("--teacher-license", default="")
    parser.add_argument("--teacher-weights", default="")
    parser.add_argument("--teacher-size", type=int, default=0, help="show it whole pictures of so many pixels")
    parser.add_argument("--teacher-patch", type=int, default=0)
    parser.add_argument("--apart", default="", help="patterns of file names to measure on their own, with commas")
    parser.add_argument("--full-size", default="", help="full-size photographs of the same classes")
    parser.add_argument("--unsure", type=float, default=UNSURE, metavar="ALPHA")
    parser.add_argument("--license", default="", help="of the weights")
    parser.add_argument("--into", type=Path, default=bundle.MODELS)
    given = parser.parse_args()
    words = {"name": given.teacher, "note": given.teacher_note, "license": given.teacher_license}
    words = {key: value for key, value in words.items() if value}
    seen = Teaching(
        weights=given.teacher_weights,
        image_size=given.teacher_size,
        patch_size=given.teacher_patch,
        whole=bool(given.teacher_size),
    )
    apart = [glob for glob in given.apart.split(",") if glob]
    into, full = given.into / given.name, given.full_size
    ship(given.source, into, given.data, given.note, words, seen, apart, full, given.unsure, given.license)
