"""An exported ODE-ViT with onnxruntime, numpy and Pillow: python predict.py MODEL.onnx PICTURE..."""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def prepare(
    path: str, size: int, mean: list[float], std: list[float], interpolation: str, crop_pct: float, crop_mode: str
) -> np.ndarray:
    """Pixel values [3,H,W] of the picture, as the model was trained to see them."""
    picture = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    target = int(size / crop_pct)
    short, long = sorted(picture.size)
    long = target if crop_mode == "squash" else int(target * long / short)
    shape = (target, long) if picture.width <= picture.height else (long, target)
    picture = picture.resize(shape, Image.Resampling[interpolation.upper()])
    left, top = (round((length - size) / 2) for length in shape)
    pixels = np.asarray(picture.crop((left, top, left + size, top + size)), np.float32) / 255
    return ((pixels - np.array(mean, np.float32)) / np.array(std, np.float32)).transpose(2, 0, 1)


onnxruntime.set_default_logger_severity(3)  # optional inputs are no constants: no need to warn of them
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
config = json.loads(session.get_modelmeta().custom_metadata_map["odevit_serve"])
transform = config["preprocessing"]
size = transform.pop("input_size")[1]
batch = np.stack([prepare(path, size, **transform) for path in sys.argv[2:]])
names = [output.name for output in session.get_outputs()]
answers = dict(zip(names, session.run(None, {"pixel_values": batch}), strict=True))
full = config["integration"]["steps"]  # a file of fixed depth has no output `steps`
for row, path in enumerate(sys.argv[2:]):
    logits, steps = answers["logits"][row], int(answers["steps"][row]) if "steps" in answers else full
    label = config["labels"][logits.argmax()] if config["labels"] else str(logits.argmax())
    print(json.dumps({"picture": path, "label": label, "steps": steps, "of": full, "logits": logits.tolist()}))
