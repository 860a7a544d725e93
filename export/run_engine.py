"""A TensorRT engine run once, to see that it works: `python -m odevit_serve.export.run_engine FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ..errors import UserError
from .formats.tensorrt import TensorRTEngine


def main() -> None:
    """Run an engine once on random numbers: `python -m odevit_serve.export.run_engine FILE`."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m odevit_serve.export.run_engine FILE.engine")
    try:
        engine = TensorRTEngine(Path(sys.argv[1]))
        shapes = {name: tuple(engine._engine.get_tensor_profile_shape(name, 0)[1]) for name in engine.inputs}
        arrays = {name: np.random.default_rng(0).normal(size=shape) for name, shape in shapes.items()}
        for name, value in engine.run(**arrays).items():
            print(f"{name} {list(value.shape)} {value.dtype}: from {value.min():.4g} to {value.max():.4g}")
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
