"""What the student copies of its teacher: equal at first, its own from then on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from odevit_serve.config import Architecture, Config, Integration, Preprocessing
from odevit_serve.errors import UsageError
from odevit_serve.train.model import ODEViT
from odevit_serve.train.recipe import Teaching
from odevit_serve.train.teacher_copy import copy_into
from odevit_serve.train.teacher_sources import load_teacher

SHAPE = Architecture(16, 4, 64, 1, 2.0, 7)  # of the teacher in conftest.py


def test_students_copies_are_equal_frozen_and_its_own(teacher_weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(teacher_weights)), SHAPE)
    student = ODEViT(Config(SHAPE, Integration(3.0, 3), Preprocessing((3, 16, 16))))
    copy_into(teacher, student)
    student.freeze_copied()
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(student.stem(pixels), teacher.hidden(pixels)[0])
        before = student.stem(pixels).clone()
        teacher.vit.pos_embed.add_(1)
        teacher.vit.head.weight.add_(1)
        torch.testing.assert_close(student.stem(pixels), before)
    assert not student.head.weight.requires_grad
    assert not torch.equal(student.head.weight, teacher.vit.head.weight)


@torch.no_grad()
def test_a_warm_start_is_the_teachers_block_up_to_its_norm_and_biases(teacher_weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(teacher_weights)), SHAPE)
    student = ODEViT(Config(SHAPE, Integration(3.0, 3), Preprocessing((3, 16, 16))))
    copy_into(teacher, student, warm_start=1)
    block = teacher.vit.blocks[1]
    torch.testing.assert_close(student.psi.attention.key.weight, block.attn.qkv.weight[64:128])
    torch.testing.assert_close(student.psi.mlp.down.weight, block.mlp.fc2.weight)
    with pytest.raises(UsageError, match="blocks 0 to 2"):
        copy_into(teacher, student, warm_start=3)


def test_a_student_of_another_width_copies_nothing(teacher_weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(teacher_weights)), Architecture(16, 4, 32, 1, 2.0, 7))
    student = ODEViT(Config(Architecture(16, 4, 32, 1, 2.0, 7), Integration(3.0, 3), Preprocessing((3, 16, 16))))
    before = {name: value.clone() for name, value in student.state_dict().items()}
    copy_into(teacher, student)
    for name, value in student.state_dict().items():
        torch.testing.assert_close(value, before[name], msg=name)
