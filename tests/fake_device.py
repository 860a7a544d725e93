"""A device that is not the CPU, on a machine that has none: tensors that say `meta` and carry values.

Torch lets nothing on `meta` be read as numbers or meet a tensor of the CPU, which is what it forbids for a GPU, too. A
tensor that is moved there by the code under test is wrapped and computes on; one that is misplaced raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
ANYWHERE = {"_to_copy", "copy_", "index", "_local_scalar_dense"}  # what a GPU takes from the CPU, too


class Placed(Tensor):
    """Values that count as being on the fake device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Placed:
        wrapper: Placed = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE, requires_grad=inner.requires_grad,
        )  # fmt: skip
        wrapper.inner = inner
        return wrapper

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placed({self.inner!r})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What a checkpoint holds: read again, it is on the CPU, as `map_location` has it for a GPU's."""
        return self.inner.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(function, args, kwargs or {})


class Machine(TorchDispatchMode):
    """While it is entered, what is made on or moved to `meta` keeps its values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(function, args, kwargs or {})


def compute(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    placed = [t for t in tensors if isinstance(t, Placed)]
    name = function.overloadpacket.__name__
    strangers = [t for t in tensors if not isinstance(t, Placed) and t.dim()]
    if placed and strangers and name not in ANYWHERE:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {DEVICE} and cpu")
    asked = kwargs.get("device")
    there = bool(placed) if asked is None else torch.device(asked) == DEVICE
    if name == "copy_":
        there = isinstance(args[0], Placed)
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    own = {id(t.inner): t for t in placed}
    args, kwargs = tree_map(lambda leaf: leaf.inner if isinstance(leaf, Placed) else leaf, (args, kwargs))
    result = function(*args, **kwargs)
    if not there:
        return result

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, Placed):
            return leaf
        return own.get(id(leaf)) if id(leaf) in own else Placed(leaf)

    return tree_map(wrapped, result)


@contextmanager
def fake_device() -> Iterator[None]:
    """Accelerate places batches and models on the fake device, as it would on a GPU."""
    AcceleratorState._reset_state(True)
    PartialState(cpu=True)
    PartialState._shared_state["device"] = DEVICE
    try:
        with Machine():
            yield
    finally:
        AcceleratorState._reset_state(True)
