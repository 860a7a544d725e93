"""A bundle in transformers: importing this module is all that its Auto classes and pipelines need.

`config.json` stays the bundle's own: `ODEViTConfig` holds the `bundle.Config` read from it, and writes it back. The
model is `ODEViT` itself under the name `net`, so that its weights are stored under the bundle's names.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import hashlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    BatchFeature,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.image_processing_utils import BaseImageProcessor
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput

from ..bundle import CONFIG, read_config, write_config
from ..config import MODEL_TYPE, Config, Preprocessing
from ..data.images import prepare, read
from ..errors import UsageError
from ..schema import build
from ..solvers import advance
from .model import ODEViT

AUTO_MAP = {  # for `trust_remote_code`: class -> where it is in the bundle, see `write_remote_code`
    "AutoConfig": "hf.ODEViTConfig",
    "AutoModel": "hf.ODEViTModel",
    "AutoModelForImageClassification": "hf.ODEViTForImageClassification",
    "AutoImageProcessor": "hf.ODEViTImageProcessor",
}


class ODEViTConfig(PretrainedConfig):
    """The bundle's configuration, with the labels as transformers names them."""

    model_type = MODEL_TYPE

    def __init__(self, **given: Any):
        names = {field.name for field in dataclasses.fields(Config)}
        mine = {key: given.pop(key) for key in list(given) if key in names}
        self._bundle = Config.from_json(json.dumps(mine)) if mine else Config()
        labels = self._bundle.labels or tuple(str(i) for i in range(self._bundle.architecture.classes))
        if given.get("num_labels") in (None, len(labels)):
            given.setdefault("id2label", dict(enumerate(labels)))
            given.setdefault("label2id", {label: i for i, label in enumerate(labels)})
        # Bundles may store float16; that is for storage, not for computing.
        given.setdefault("dtype", "float32")
        given |= {"architectures": list(self._bundle.architectures), "auto_map": dict(self._bundle.auto_map)}
        super().__init__(**given)

    @property
    def bundle(self) -> Config:
        """What `config.json` says; with other labels it is another model, of which nothing has been measured."""
        names: Any = self.id2label
        own, labels = self._bundle, tuple(str(names[i]) for i in range(len(names)))
        if labels == (own.labels or tuple(str(i) for i in range(own.architecture.classes))):
            return own
        shape = dataclasses.replace(own.architecture, classes=len(labels))
        return own.replace(architecture=shape, labels=labels).unmeasured()

    @property
    def hidden_size(self) -> int:
        return self._bundle.architecture.width

    @property
    def image_size(self) -> int:
        return self._bundle.architecture.image_size

    @property
    def patch_size(self) -> int:
        return self._bundle.architecture.patch_size

    @property
    def num_channels(self) -> int:
        return self._bundle.architecture.channels

    @property
    def num_attention_heads(self) -> int:
        return self._bundle.architecture.heads

    @property
    def num_hidden_layers(self) -> int:
        return self._bundle.integration.steps

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.bundle.to_json())
        return data

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **_: Any) -> None:
        if push_to_hub:
            raise UsageError("the configuration is not pushed by itself: push the bundle with odevit-serve push")
        write_config(Path(save_directory), self.bundle)


class ODEViTImageProcessor(BaseImageProcessor):
    """The evaluation transform of a bundle, by the function that serves it: the same pixels, bit for bit."""

    model_input_names = ["pixel_values"]  # noqa: RUF012  (transformers' own declaration)

    def __init__(self, **given: Any):
        names = [field.name for field in dataclasses.fields(Preprocessing)]
        self._words = build(Preprocessing, {key: given.pop(key) for key in names if key in given})
        given.pop("image_processor_type", None)
        super().__init__(**given)

    @property
    def preprocessing(self) -> Preprocessing:
        words: Preprocessing = self._words
        return words

    @property
    def image_mean(self) -> list[float]:
        return list(self.preprocessing.mean)

    @property
    def image_std(self) -> list[float]:
        return list(self.preprocessing.std)

    @property
    def size(self) -> dict[str, int]:
        return {"height": self.preprocessing.input_size[1], "width": self.preprocessing.input_size[2]}

    def preprocess(self, images: Any, return_tensors: str | None = None, **_: Any) -> BatchFeature:
        several = list(images) if isinstance(images, list | tuple) or getattr(images, "ndim", 3) == 4 else [images]
        pixels = [prepare(read(_channels_last(image)), self.preprocessing) for image in several]
        return BatchFeature({"pixel_values": pixels}, tensor_type=return_tensors)

    def to_dict(self) -> dict[str, Any]:
        rest = {key: value for key, value in self.__dict__.items() if not key.startswith("_")}
        return {**rest, **dataclasses.asdict(self.preprocessing), "image_processor_type": type(self).__name__}


def _channels_last(image: Any) -> Any:
    """Arrays as Pillow has them, [height, width, channels]; everything else as it is."""
    if isinstance(image, Tensor):
        image = image.detach().cpu().numpy()
    if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[2] not in (1, 3):
        return image.transpose(1, 2, 0)
    return image


class ODEViTPreTrainedModel(PreTrainedModel):
    config_class = ODEViTConfig
    config: ODEViTConfig
    base_model_prefix = "net"  # what is stored without this prefix goes behind it
    main_input_name = "pixel_values"
    input_modalities = ["image"]  # noqa: RUF012
    _no_split_modules = ["Psi"]  # noqa: RUF012  (transformers' own declaration)

    def __init__(self, config: ODEViTConfig):
        super().__init__(config)
        self.net = ODEViT(config.bundle)
        for value in self.net.parameters():
            value._is_hf_initialized = value.device.type != "meta"  # type: ignore[attr-defined]  # transformers' own mark
        self._as_read = ""  # digest of the weights that the configuration's measurements belong to
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Tensors that were not in the checkpoint (a head of other classes) start as in a new model."""
        missing = [n for n, value in module.named_parameters(recurse=False) if not _is_set(value)]
        if not missing or self.device.type == "meta":
            return
        place = next(name for name, own in self.net.named_modules() if own is module)
        fresh = ODEViT(self.net.config).get_submodule(place)
        for name in missing:
            module.get_parameter(name).data.copy_(fresh.get_parameter(name))

    def trajectory(
        self, pixel_values: Tensor | None, hidden: bool | None, attentions: bool | None, settings: dict[str, Any]
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """The last state; if asked for, the states from the start on, and the map that each step begins with."""
        expected = self.config.bundle.preprocessing.input_size
        if pixel_values is None or tuple(pixel_values.shape[1:]) != tuple(expected):
            found = None if pixel_values is None else list(pixel_values.shape)
            raise UsageError(f"pixel_values must have shape {['batch', *expected]}, not {found}")
        hidden = self.config.output_hidden_states if hidden is None else hidden
        attentions = self.config.output_attentions if attentions is None else attentions
        states = [self.net.stem(pixel_values.to(self.dtype))]
        maps: list[Tensor] = []

        def watched(fields: Any, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
            if attentions:
                maps.append(self.net.psi.attention.maps(x))
            return advance(fields, x, *rest)

        for point in self.net.trajectory(states[0], **settings, advance=watched):
            states = [*states, point.state] if hidden else [point.state]
        return states[-1], tuple(states) if hidden else None, tuple(maps) if attentions else None

    @classmethod
    def from_pretrained(cls, *arguments: Any, **settings: Any) -> Self:
        loaded: Any = super().from_pretrained(*arguments, **settings)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with output_loading_info
        model._as_read = _digest(model.net) if model.dtype == torch.float32 else ""  # others may have been rounded
        return loaded  # type: ignore[no-any-return]

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **_: Any,
    ) -> None:
        """Write a bundle. Weights that were changed since they were read lose what had been measured of them."""
        if push_to_hub:
            raise UsageError("save first, then push the folder with odevit-serve push")
        if not is_main_process:
            return
        net = copy.deepcopy(self.net)
        if state_dict is not None:
            net.load_state_dict({name.removeprefix("net."): value for name, value in state_dict.items()})
        config = self.config.bundle
        net.config = config if _digest(net) == self._as_read else config.unmeasured()
        net.save_pretrained(save_directory)
        if config.auto_map:
            write_remote_code(save_directory)


class ODEViTModel(ODEViTPreTrainedModel):
    """The states without an answer: `pooler_output` is CLS at the end of the trajectory."""

    def forward(
        self,
        pixel_values: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        steps: int | None = None,
        horizon: float | None = None,
        solver: str | None = None,
    ) -> BaseModelOutputWithPooling | tuple[Tensor, ...]:
        settings = {"steps": steps, "horizon": horizon, "solver": solver}
        state, states, maps = self.trajectory(pixel_values, output_hidden_states, output_attentions, settings)
        output = BaseModelOutputWithPooling(state, state[:, 0], states, maps)  # type: ignore[arg-type]  # FloatTensor
        return output if return_dict is not False and self.config.return_dict else output.to_tuple()


class ODEViTForImageClassification(ODEViTPreTrainedModel):
    """The model with its head, at full depth; `steps` cuts the horizon into another number of steps."""

    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        steps: int | None = None,
        horizon: float | None = None,
        solver: str | None = None,
    ) -> ImageClassifierOutput | tuple[Tensor, ...]:
        settings = {"steps": steps, "horizon": horizon, "solver": solver}
        state, states, maps = self.trajectory(pixel_values, output_hidden_states, output_attentions, settings)
        logits = self.net.answer(state)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        known = self.config.bundle.confidence
        if known is not None and not self.training:
            logits = logits / known.temperature  # so that a softmax of them is what the runtime gives
        output = ImageClassifierOutput(loss, logits, states, maps)  # type: ignore[arg-type]  # FloatTensor
        return output if return_dict is not False and self.config.return_dict else output.to_tuple()


def _is_set(value: nn.Parameter) -> bool:
    return bool(getattr(value, "_is_hf_initialized", False))


def _digest(net: ODEViT) -> str:
    """Of all weights as float32."""
    known = hashlib.sha256()
    for name, value in net.state_dict().items():
        known.update(name.encode() + value.detach().float().cpu().numpy().tobytes())
    return known.hexdigest()


def write_remote_code(folder: str | os.PathLike[str]) -> list[Path]:
    """Write the modules that `trust_remote_code=True` needs into a bundle, and say so in its configuration.

    They are this module and those it imports, side by side, so that odevit-serve need not be installed there.
    """
    target = Path(folder)
    config = read_config(target)
    written = []
    for module in _with_imports(sys.modules[__name__]):
        text = re.sub(r"^(\s*from )\.+(?:\w+\.)*(\w*) import", r"\1.\2 import", inspect.getsource(module), flags=re.M)
        path = target / f"{module.__name__.rpartition('.')[2]}.py"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    write_config(target, config.replace(auto_map=dict(AUTO_MAP)))
    return [*written, target / CONFIG]


def _with_imports(module: ModuleType) -> list[ModuleType]:
    """A module and those of this package that it imports, directly or not."""
    found, waiting = {module.__name__: module}, [module]
    while waiting:
        source = waiting.pop()
        for node in ast.walk(ast.parse(inspect.getsource(source))):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), source.__package__)
            for name in [base] if node.module else [f"{base}.{alias.name}" for alias in node.names]:
                if name not in found:
                    found[name] = importlib.import_module(name)
                    waiting.append(found[name])
    return list(found.values())


AutoConfig.register(MODEL_TYPE, ODEViTConfig, exist_ok=True)
AutoModel.register(ODEViTConfig, ODEViTModel, exist_ok=True)
AutoModelForImageClassification.register(ODEViTConfig, ODEViTForImageClassification, exist_ok=True)
AutoImageProcessor.register(ODEViTConfig, ODEViTImageProcessor, ODEViTImageProcessor, exist_ok=True)
