"""How good a network is on images: right within the first 1, 3 and 5, and in agreement with a teacher."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from ..config import Preprocessing
from ..data.datasets import Images
from .batches import PictureDataset, loader
from .teacher import Teacher


def judge(logits: Tensor, labels: Tensor, teachers: Tensor) -> Tensor:
    """One row an image: right within the first 1, 3, 5; cross-entropy; agrees with the teacher; probability."""
    ranked = logits.topk(min(5, logits.shape[1]), -1).indices == labels[:, None]
    right = [ranked[:, :k].any(1).float() for k in (1, 3, 5)]
    loss = F.cross_entropy(logits.float(), labels.clamp_min(0), reduction="none")
    agrees = (logits.argmax(-1) == teachers.argmax(-1)).float()
    return torch.stack([*right, loss, agrees, logits.float().softmax(-1).amax(-1)], 1)


class Judge:
    """Measures a network on validation images; the teacher's answers to them are computed once."""

    def __init__(
        self, images: Images, spec: Preprocessing, batch_size: int, teacher: Teacher | None, machine: Accelerator
    ):
        self.machine, self.teacher = machine, teacher
        self.labelled = images.labels is not None
        self.data: Any = machine.prepare_data_loader(loader(PictureDataset(images, spec), batch_size, workers=0))
        self.score = "accuracy" if self.labelled else "agreement" if teacher else "certainty"
        self.answers: list[Tensor] = []

    @torch.no_grad()
    def __call__(self, net: nn.Module) -> dict[str, float]:
        was_training = net.training
        net.eval()
        rows = []
        for index, batch in enumerate(self.data):
            logits = net(batch.pixel_values)
            if self.teacher and index == len(self.answers):
                self.answers.append(self.teacher(batch.pixel_values))
            teachers = self.answers[index] if self.teacher else logits
            rows.append(self.machine.gather_for_metrics(judge(logits, batch.labels, teachers)))
        net.train(was_training)
        means = torch.cat(rows).double().mean(0).tolist()
        named = dict(zip(("accuracy", "accuracy@3", "accuracy@5", "val_loss", "agreement", "certainty"), means))
        if not self.labelled:
            named = {k: v for k, v in named.items() if k in ("agreement", "certainty")}
        if not self.teacher:
            named.pop("agreement", None)
        return named
