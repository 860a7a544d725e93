"""Tensors of a bundle read without torch: the same as safetensors reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from odevit_serve.bundle import WEIGHTS
from odevit_serve.demo.weights import head, read_tensors


def test_the_head_is_read_in_both_precisions(tmp_path: Path) -> None:
    weight, bias = torch.randn(3, 4), torch.randn(3).half()
    save_file({"other": torch.zeros(7), "head.weight": weight, "head.bias": bias}, tmp_path / WEIGHTS)
    found = head(tmp_path)
    assert found is not None
    np.testing.assert_array_equal(found[0], weight.numpy())
    np.testing.assert_array_equal(found[1], bias.float().numpy())
    assert found[0].dtype == found[1].dtype == np.float32


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    assert head(tmp_path) is None
    save_file({"head.weight": torch.zeros(2, 2), "whole": torch.zeros(2, dtype=torch.int64)}, tmp_path / WEIGHTS)
    assert head(tmp_path) is None
    assert read_tensors(tmp_path, ["whole"]) is None
