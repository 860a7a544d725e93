"""The unrolled file in LitServe, as its documentation would have one write it; `benchmark serve` starts this."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import litserve
import numpy as np

from ..data import images
from ..runtime.results import label_names
from ..runtime.sessions import open_session, read_metadata
from .servers import SLOTS


class Classify(litserve.LitAPI):  # type: ignore[misc, name-defined]
    def __init__(self, source: str, threads: int, **options: Any):
        super().__init__(**options)
        self.source, self.threads = source, threads

    def setup(self, device: str) -> None:
        path = Path(self.source)
        self.config, self.session = read_metadata(path), open_session(path, threads=self.threads)
        self.labels = label_names(self.config)

    def decode_request(self, request: dict[str, str]) -> np.ndarray:
        return images.prepare(images.read(base64.b64decode(request["image"])), self.config.preprocessing)

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.session.run(["logits"], {"pixel_values": x})[0]  # type: ignore[no-any-return]

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, output: np.ndarray) -> dict[str, Any]:
        values = np.exp(output - output.max())
        top = int(values.argmax())
        return {"label": self.labels[top], "probability": float(values[top] / values.sum())}


if __name__ == "__main__":
    source, port, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    api = Classify(source, threads, max_batch_size=SLOTS, batch_timeout=0.005)
    server = litserve.LitServer(api, accelerator="cpu", timeout=60)
    server.run(host="127.0.0.1", port=port, num_api_servers=1, log_level="error", generate_client_file=False)
