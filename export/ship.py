"""From a finished run to a bundled model, in one command for those who build the package:

    python -m odevit_serve.export.ship RUN/bundle NAME --data DATA [--note TEXT] [--teacher NAME --teacher-note TEXT]
        [--teacher-weights FILE]

It stores the weights as float16, makes the graphs of the runtime, calibrates on the images that training set aside,
reads the test images once, times the teacher beside it, and writes what came out into the card.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from .. import bundle
from ..benchmark.torch_rows import teacher_time
from ..guarantee.calibrate import calibrate, open_images
from ..model_card import write_card
from ..train.model import ODEViT
from ..train.recipe import Teaching
from ..train.val import by_step, validate
from . import parts
from .job import install

EPSILON, DELTA = 0.01, 0.05


def ship(
    source: Path, folder: Path, data: str, note: str = "", teacher: dict[str, Any] | None = None, weights: str = ""
) -> None:
    model = ODEViT.from_pretrained(source)
    config = model.config
    facts = dataclasses.replace(config.teacher, **(teacher or {})) if config.teacher else None
    provenance = {**config.provenance, "note": note} if note else config.provenance
    model.config = config.replace(name=folder.name, teacher=facts, provenance=provenance)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:  # the old bundle stays until all went well
        made = Path(scratch) / folder.name
        model.save_pretrained(made, half=True)
        parts(made)
        calibrate(made, open_images(data, _aside(config), division=config.division), EPSILON, DELTA)
        config = bundle.read_config(made)
        if config.teacher:
            time = round(teacher_time(made, config.teacher, Path(scratch)), 2)
            config = config.replace(teacher=dataclasses.replace(config.teacher, time=time))
        bundle.write_config(made, config.replace(metrics={**config.metrics, **measure(made, data, weights)}))
        write_card(made)
        install(made, folder, Path(scratch))


def _aside(config: bundle.Config) -> str:
    """The images to calibrate on: those set aside for it, else those that chose the model."""
    return "calibration" if config.division is not None and config.division.calibration else "validation"


def measure(folder: Path, data: str, teacher_weights: str = "") -> dict[str, Any]:
    """Accuracy on the held-out split: by steps in torch, the teacher's, and with early exit in the runtime.

    Half as many steps again are also taken beyond the horizon, at the same step size.
    """
    own = bundle.read_config(folder).integration
    longer = own.steps * 3 // 2
    onward = by_step(str(folder), data)[longer - 1]
    rows = validate(str(folder), data, teacher=Teaching(weights=teacher_weights))
    *fixed, early = rows
    found: dict[str, Any] = {"accuracy_by_steps": {str(row["steps"]): round(row["accuracy"], 4) for row in fixed}}
    if teacher_weights:
        found["test_accuracy_teacher"] = round(early["teacher_accuracy"], 4)
    return {
        **found,
        f"test_accuracy_horizon_{longer * own.step_size:g}": round(onward, 4),
        "test_accuracy_adaptive": round(early["accuracy"], 4),
        "test_mean_steps_adaptive": round(early["steps"], 2),
        "test_images": early["images"],
    }


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
    parser.add_argument("--into", type=Path, default=bundle.MODELS)
    given = parser.parse_args()
    words = {"name": given.teacher, "note": given.teacher_note, "license": given.teacher_license}
    words = {key: value for key, value in words.items() if value}
    ship(given.source, given.into / given.name, given.data, given.note, words, given.teacher_weights)
