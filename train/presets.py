"""Named shapes: the rows of the paper's Table 4, and two for a ViT-Ti teacher, `tiny` for pictures of CIFAR's size and
`tiny-224` for photographs. Data only; torch is not needed.
"""

from __future__ import annotations

from ..config import Architecture, Config, Integration, Preprocessing, TeacherFacts

_IMAGENET = Preprocessing((3, 224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bicubic", 0.875)
_HALF = Preprocessing((3, 32, 32))
_DINO = TeacherFacts("timm:vit_base_patch16_224.dino", 12, 768, 12, 4.0, license="apache-2.0")
_TINY = TeacherFacts("timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k", 12, 192, 3, 4.0, license="apache-2.0")
_PAPER = Integration(horizon=12.0, steps=24, splitting="lie")


def _paper(
    name: str, width: int, heads: int, mlp_ratio: float, registers: int, classes: int, distilled: bool
) -> Config:
    return Config(
        Architecture(224, 16, width, heads, mlp_ratio, classes, registers),
        _PAPER,
        _IMAGENET,
        teacher=_DINO if distilled else None,
        name=name,
    )


PRESETS: dict[str, Config] = {
    config.name: config
    for config in (
        _paper("scratch-cifar10", 192, 8, 1.0, 1, 10, distilled=False),
        _paper("scratch-cifar100", 768, 8, 1.0, 1, 100, distilled=False),
        _paper("scratch-imagenet100", 768, 12, 1.0, 1, 100, distilled=False),
        _paper("base-cifar10", 768, 12, 4.0, 10, 10, distilled=True),
        _paper("base-cifar100", 768, 12, 4.0, 10, 100, distilled=True),
        _paper("base-imagenet100", 768, 12, 4.0, 10, 100, distilled=True),
        _paper("small-cifar10", 768, 12, 1.0, 10, 10, distilled=True),
        _paper("small-cifar100", 768, 12, 1.0, 10, 100, distilled=True),
        Config(
            Architecture(32, 4, 192, 3, 4.0, 10, registers=4, convolution=3),
            Integration(12.0, 12),
            _HALF,
            teacher=_TINY,
            name="tiny",
        ),
        Config(
            Architecture(224, 16, 192, 3, 4.0, 1000, registers=4, convolution=3),
            Integration(12.0, 12),
            Preprocessing((3, 224, 224), crop_pct=0.9),
            teacher=_TINY,
            name="tiny-224",
        ),
    )
}
