"""What a model costs by its shape: parameters and multiply-adds, counted as matrix products and convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .solvers import evaluations

if TYPE_CHECKING:
    from .config import Architecture, Integration, TeacherFacts


def parameters(shape: Architecture) -> dict[str, int]:
    """Of psi (with registers), and of all else, which a teacher lends where it can."""
    psi = _projections(shape) * shape.width**2 + 2 * shape.width * shape.hidden + 4 * shape.width
    psi += shape.hidden * shape.convolution**2 + shape.registers * shape.width
    stem = sum(kernel**2 * inputs * outputs + outputs for inputs, outputs, kernel, _, _ in shape.convolutions())
    return {
        "psi": psi,
        "rest": stem + (2 + shape.patches) * shape.width + (shape.width + 1) * shape.classes,
    }


def macs_by_part(shape: Architecture) -> dict[str, int]:
    """Multiply-adds of one image: the stem, one evaluation of attention G and of the MLP F, the head."""
    tokens, width = shape.tokens, shape.width
    return {
        "stem": sum(k**2 * inputs * outputs * side**2 for inputs, outputs, k, _, side in shape.convolutions()),
        "attention": _projections(shape) * tokens * width**2 + 2 * tokens**2 * width,
        "mlp": 2 * tokens * width * shape.hidden + shape.patches * shape.hidden * shape.convolution**2,
        "head": width * shape.classes,
    }


def macs_per_step(shape: Architecture, integration: Integration) -> int:
    """Multiply-adds of one step: as many evaluations as the solver makes, and the head."""
    part = macs_by_part(shape)
    attention, mlp = evaluations(integration.solver, integration.splitting)
    return attention * part["attention"] + mlp * part["mlp"] + part["head"]


def macs(shape: Architecture, integration: Integration, steps: float | None = None) -> float:
    """Multiply-adds of one image, at full depth or at `steps`, which may be a mean."""
    steps = integration.steps if steps is None else steps
    return macs_by_part(shape)["stem"] + steps * macs_per_step(shape, integration)


def teacher_parameters(teacher: TeacherFacts, student: Architecture) -> int:
    """Of a ViT of the teacher's shape, for the pictures, patches and classes of the student."""
    width, hidden = teacher.width, int(teacher.width * teacher.mlp_ratio)
    block = 4 * width**2 + 2 * width * hidden + 9 * width + hidden
    patch = student.channels * student.patch_size**2 * width + width
    embedding = patch + (2 + student.patches) * width
    return teacher.layers * block + embedding + 2 * width + (width + 1) * student.classes


def teacher_macs(teacher: TeacherFacts, student: Architecture) -> int:
    """Multiply-adds of that ViT for one image."""
    tokens, width, hidden = 1 + student.patches, teacher.width, int(teacher.width * teacher.mlp_ratio)
    block = 4 * tokens * width**2 + 2 * tokens**2 * width + 2 * tokens * width * hidden
    stem = student.patches * student.channels * student.patch_size**2 * width
    return stem + teacher.layers * block + width * student.classes


def _projections(shape: Architecture) -> int:
    """Of attention: L2 attention ties query and key."""
    return 3 if shape.attention == "l2" else 4
