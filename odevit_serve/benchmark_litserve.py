"""The unrolled file in LitServe, as its documentation would have one write it; `benchmark serve` starts this."""

from __future__ import annotations

import base64
import sys
from typing import Any

import litserve
import numpy as np

from .benchmark_serve import SLOTS
from .model import FileModel, load


class Classify(litserve.LitAPI):  # type: ignore[misc, name-defined]
    def __init__(self, source: str, threads: int, **options: Any):
        super().__init__(**options)
        self.source, self.threads = source, threads

    def setup(self, device: str) -> None:
        model = load(self.source, threads=self.threads)
        assert isinstance(model, FileModel)
        self.model = model

    def decode_request(self, request: dict[str, str]) -> np.ndarray:
        return self.model.prepare(base64.b64decode(request["image"]))

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.model.session.run(["logits"], {"pixel_values": x})[0]  # type: ignore[no-any-return]

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, output: np.ndarray) -> dict[str, Any]:
        values = np.exp(output - output.max())
        top = int(values.argmax())
        return {"label": self.model.labels[top], "probability": float(values[top] / values.sum())}


if __name__ == "__main__":
    source, port, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    api = Classify(source, threads, max_batch_size=SLOTS, batch_timeout=0.005)
    server = litserve.LitServer(api, accelerator="cpu", timeout=60)
    server.run(host="127.0.0.1", port=port, num_api_servers=1, log_level="error", generate_client_file=False)
