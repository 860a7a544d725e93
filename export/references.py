"""What an export is compared with: the same images by the bundle's own graphs, by torch, or by parts just made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import bundle
from ..bundle import STEP_OUTPUTS
from ..config import Config, Integration
from ..runtime.sessions import Graphs

if TYPE_CHECKING:
    from ..train.model import ODEViT

Array = np.ndarray[Any, Any]


def of_graphs(graphs: Graphs, own: Integration, pixels: Array, with_attention: bool = False) -> dict[str, Array]:
    """Logits, and the map where asked for, at the end of a trajectory by the graphs of a bundle."""
    state = graphs.stem.run(["state"], {"pixel_values": pixels})[0]
    size: Array = np.full(len(pixels), own.step_size, np.float32)
    for _ in range(own.steps):
        state, logits = graphs.step.run(["next_state", "logits"], {"state": state, "step_size": size})
    answer = {"logits": logits}
    return answer | {"cls_attention": graphs.maps(state)} if with_attention else answer


def of_torch(model: ODEViT, own: Integration, pixels: Array, with_attention: bool = False) -> dict[str, Array]:
    """The same by the model itself."""
    import torch

    with torch.no_grad():
        x = model.stem(torch.from_numpy(pixels))
        for point in model.trajectory(x, own.steps, own.horizon, own.solver, own.splitting):
            x = point.state
        answer = {"logits": model.answer(x).numpy()}
        return answer | {"cls_attention": model.cls_attention(x).numpy()} if with_attention else answer


def of_parts(sessions: Mapping[str, Any], config: Config, pixels: Array) -> dict[str, Array]:
    """The same by sessions of stem, step and attention, which no bundle holds yet; every output of the step is run."""
    own = config.integration
    state = sessions[bundle.STEM].run(None, {"pixel_values": pixels})[0]
    size: Array = np.full(len(pixels), own.step_size, np.float32)
    for _ in range(own.steps):
        found = dict(
            zip(STEP_OUTPUTS, sessions[bundle.STEP].run(list(STEP_OUTPUTS), {"state": state, "step_size": size}))
        )
        state = found["next_state"]
    tokens = np.ascontiguousarray(state[:, : config.architecture.tokens])
    return {"logits": found["logits"], "cls_attention": sessions[bundle.ATTENTION].run(None, {"state": tokens})[0]}
