"""Fuzzing of what reads things from elsewhere: pictures, bundles, ONNX files, bodies of requests, recipes.

    PYTHONPATH=tests python -m hardening.fuzz --minutes 60

Each target is run in a process of its own for its share of that CPU time, in rounds of some hundred cases that
hypothesis draws. A case is good when it is answered, or refused by one sentence of bounded size (`UserError`; over HTTP
a status that the interface documents). Anything else is a finding: it is made as small as it gets and printed with what
draws it again. A process that dies leaves the case that killed it beside the report.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import faulthandler
import json
import math
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from conftest import tiny_folder
from hardening.mutations import changed_json, mutated, pictures
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import odevit_serve
from odevit_serve import bundle
from odevit_serve.config import Preprocessing
from odevit_serve.data import images
from odevit_serve.errors import UserError

ROUND = 200  # cases that hypothesis draws by one seed
MOST_SECONDS = 10.0  # of CPU that one case may take
MOST_TEXT = 1000  # characters of a sentence beside the path it names
MOST_FINDINGS = 20
Target = tuple[st.SearchStrategy[Any], Callable[[Any], str]]


def refused(call: Callable[[], str], near: str = "") -> str:
    """How a case ended: what `call` gives, or the kind of refusal."""
    try:
        return call()
    except UserError as error:
        text = str(error).replace(near, "") if near else str(error)
        assert len(text) <= MOST_TEXT, f"a sentence of {len(text)} characters: {text[:200]}"
        assert text.strip(), "an empty sentence"
        return type(error).__name__


def of_images(folder: Path) -> Target:
    """The image reader, as the server calls it."""
    transform = Preprocessing((3, 16, 16))

    def run(data: bytes) -> str:
        def read() -> str:
            pixels = images.prepare(images.open_picture(data, max_pixels=images.SERVED_PIXELS), transform)
            assert pixels.shape == (3, 16, 16)
            assert np.isfinite(pixels).all()
            return "read"

        return refused(read)

    return mutated(pictures()), run


def of_bundle(folder: Path) -> Target:
    """A bundle with one of its files changed, gone or another's; what opens also answers."""
    whole = tiny_folder(folder / "whole")
    files = sorted(path.name for path in whole.iterdir())
    own, work = json.loads((whole / bundle.CONFIG).read_text()), folder / "changed"
    contents = {name: (whole / name).read_bytes() for name in files}

    def run(case: tuple[str, bytes | None]) -> str:
        name, data = case
        work.mkdir(exist_ok=True)
        for other in files:
            if other != name:
                (work / other).write_bytes(contents[other])
        (work / name).unlink(missing_ok=True)
        if data is not None:
            (work / name).write_bytes(data)

        def answer() -> str:
            model = odevit_serve.load(work, threads=1)
            model.predict(np.zeros((16, 16, 3), np.uint8))
            model.attention(np.zeros((16, 16, 3), np.uint8))
            return "answered"

        def start() -> str:
            from odevit_serve.train.model import ODEViT

            ODEViT.from_pretrained(work)
            return "trained on"

        ends = [refused(answer, str(work))]
        if name in (bundle.CONFIG, bundle.WEIGHTS):
            ends.append(refused(start, str(work)))
        return ", ".join(ends)

    bytes_of = [st.tuples(st.just(name), mutated([contents[name]])) for name in files]
    gone = st.tuples(st.sampled_from(files), st.none())
    configured = st.tuples(st.just(bundle.CONFIG), changed_json([own]))
    return st.one_of(configured, configured, *bytes_of, gone), run


def of_onnx(folder: Path) -> Target:
    """Single files: what they say about themselves, and their bytes."""
    import onnx

    from odevit_serve.export import job
    from odevit_serve.runtime.sessions import read_metadata

    whole = tiny_folder(folder / "whole")
    made: list[bytes] = []
    for kind in ("onnx", "onnx-adaptive"):
        path = folder / f"{kind}.onnx"
        job.export(str(whole), job.Settings(format=kind, output=str(path)))
        made.append(path.read_bytes())
    models = [onnx.load_from_string(data) for data in made]
    properties = [{entry.key: entry.value for entry in model.metadata_props} for model in models]
    work = folder / "changed.onnx"

    @st.composite
    def case(draw: st.DrawFn) -> bytes:
        which = draw(st.integers(0, 1))
        if draw(st.integers(0, 2)) == 0:
            return draw(mutated([made[which]]))
        model, values = models[which], dict(properties[which])
        key = draw(st.sampled_from([*sorted(values), bundle.METADATA_KEY, bundle.METADATA_KEY, "other"]))
        if key == bundle.METADATA_KEY:
            text = draw(changed_json([json.loads(values[key])])).decode("utf-8", "replace")
        else:
            text = draw(st.text(max_size=80))
        values[key] = text
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        del copy.metadata_props[:]
        for name, value in values.items():
            copy.metadata_props.add(key=name, value=value)
        return copy.SerializeToString()

    def run(data: bytes) -> str:
        work.write_bytes(data)

        def answer() -> str:
            odevit_serve.load(work, threads=1).predict(np.zeros((16, 16, 3), np.uint8))
            return "answered"

        def tell() -> str:
            read_metadata(work)
            return "described"

        return f"{refused(answer, str(work))}, {refused(tell, str(work))}"

    return case(), run


def of_requests(folder: Path) -> Target:
    """Bodies for the Open Inference Protocol, with and without binary tensors, through the whole application."""
    import httpx

    from odevit_serve.serving.engine import Engine
    from odevit_serve.serving.http.app import ERRORS, create_app

    engine = Engine(odevit_serve.load(tiny_folder(folder / "whole"), threads=1), slots=4, queue=64).start()
    app, loop = create_app(engine), asyncio.new_event_loop()
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://x")
    png = pictures()[0]
    packed = len(png).to_bytes(4, "little") + png
    pixels = np.zeros((1, 3, 16, 16), np.float32).tobytes()

    def tensor(name: str, shape: list[int], kind: str, **more: Any) -> dict[str, Any]:
        head = {"name": name, "shape": shape, "datatype": kind, **more}
        return {"id": "a", "parameters": {"max_steps": 2}, "inputs": [head], "outputs": [{"name": "label"}]}

    def sized(blob: bytes) -> dict[str, Any]:
        return {"parameters": {"binary_data_size": len(blob)}}

    heads = [
        tensor("image", [1], "BYTES", **sized(packed)),
        tensor("image", [2], "BYTES", **sized(packed * 2)),
        tensor("pixel_values", [1, 3, 16, 16], "FP32", **sized(pixels)),
        tensor("image", [1], "BYTES", data=[base64.b64encode(png).decode()]),
        tensor("pixel_values", [1, 3, 16, 16], "FP32", data=[0.5] * 768),
    ]
    blobs = [packed, packed * 2, pixels, b""]

    @st.composite
    def case(draw: st.DrawFn) -> tuple[bytes, str | None]:
        head = draw(changed_json(heads, 3) | mutated([json.dumps(h).encode() for h in heads]))
        blob = draw(st.sampled_from(blobs) | mutated(blobs))
        if not blob and draw(st.booleans()):
            return head, None
        length = draw(
            st.just(str(len(head))) | st.integers(-1, 2**70).map(str) | st.text("0123456789-+ .xe", max_size=9)
        )
        return head + blob, length

    def run(case: tuple[bytes, str | None]) -> str:
        body, length = case
        headers = {} if length is None else {"Inference-Header-Content-Length": length}
        response = loop.run_until_complete(client.post("/v2/models/random/infer", content=body, headers=headers))
        assert response.status_code in {200, *ERRORS} - {500}, (response.status_code, response.text[:300])
        if response.status_code != 200:
            assert len(response.json()["error"]) <= MOST_TEXT
        assert not engine.pending
        return str(response.status_code)

    return case(), run


def of_recipes(folder: Path) -> Target:
    """Recipes as TOML and as JSON, and `--set`."""
    from odevit_serve.train.recipe import RECIPES, read_recipe

    texts = [path.read_bytes() for path in sorted(RECIPES.glob("*.toml"))]
    loaded = [read_recipe(path.stem).to_dict() for path in sorted(RECIPES.glob("*.toml"))]
    toml, plain = folder / "recipe.toml", folder / "recipe.json"
    keys = [f"{section}.{key}" for section, values in loaded[0].items() if isinstance(values, dict) for key in values]
    settings_of = st.tuples(st.sampled_from([*keys, "preset", "stages", "a.b.c", ""]) | st.text(max_size=9), st.text())
    overrides = st.lists(settings_of.map("=".join) | st.text(max_size=12), max_size=2)

    def run(case: tuple[bytes, Path, list[str]]) -> str:
        data, path, asked = case
        path.write_bytes(data)

        def read() -> str:
            recipe = read_recipe(path, asked)
            recipe.model(10, ())
            return "read"

        return refused(read, str(path))

    by_text = st.tuples(mutated(texts), st.just(toml), overrides)
    by_value = st.tuples(changed_json(loaded), st.just(plain), overrides)
    return by_text | by_value, run


TARGETS: dict[str, Callable[[Path], Target]] = {
    "images": of_images,
    "bundle": of_bundle,
    "onnx": of_onnx,
    "requests": of_requests,
    "recipes": of_recipes,
}


def fuzz(
    name: str, folder: Path, seconds: float, cases: int = 10**9, first: int = 0, within: float = math.inf
) -> dict[str, Any]:
    """Run a target for so much CPU time or so many cases, `within` seconds at most; what happened, as numbers."""
    strategy, run = TARGETS[name](folder)
    ends: Counter[str] = Counter()
    findings: dict[str, str] = {}  # by where they came from: one cause is told once
    slowest, number, begun, end = 0.0, first, time.process_time(), time.monotonic() + within
    current = (folder / "current.pickle").open("wb", buffering=0)

    def one(case: Any) -> None:
        nonlocal slowest
        current.seek(0)
        current.truncate()
        current.write(pickle.dumps(case))
        before = time.process_time()
        end = run(case)
        took = time.process_time() - before
        slowest = max(slowest, took)
        assert took < MOST_SECONDS, f"took {took:.1f} s of CPU"
        ends[end] += 1

    def goes_on() -> bool:
        used = time.process_time() - begun < seconds and time.monotonic() < end
        return used and sum(ends.values()) < cases and len(findings) < MOST_FINDINGS

    while goes_on():
        check = given(strategy)(one)
        check = settings(
            max_examples=min(ROUND, cases), deadline=None, database=None, print_blob=False,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
        )(check)  # fmt: skip
        try:
            seed(number)(check)()
        except Exception as error:
            findings.update(
                {_place(each): _told(each, number) for each in _flat(error) if _place(each) not in findings}
            )
        number += 1
    return {
        "target": name,
        "cases": sum(ends.values()),
        "cpu_seconds": round(time.process_time() - begun, 1),
        "slowest_seconds": round(slowest, 2),
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "ends": dict(ends.most_common(12)),
        "seeds": [first, number - 1],
        "findings": list(findings.values()),
    }


def _flat(error: BaseException) -> list[BaseException]:
    return [e for each in error.exceptions for e in _flat(each)] if isinstance(error, ExceptionGroup) else [error]


def _place(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    return f"{type(error).__name__} at {frames[-1].name}:{frames[-1].lineno}" if frames else type(error).__name__


def _told(error: BaseException, number: int) -> str:
    """The end of the traceback, and the case as hypothesis notes it, both cut to a bearable length."""
    frames = "".join(traceback.format_tb(error.__traceback__)[-4:])
    notes = " ".join(getattr(error, "__notes__", []))
    return f"seed {number}: {_place(error)}: {str(error)[:300]}\n{frames}{notes[:600]}"


def main() -> int:
    reader = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    reader.add_argument("targets", nargs="*", default=list(TARGETS), help=f"of {', '.join(TARGETS)}; default: all")
    reader.add_argument("--minutes", type=float, default=60.0, help="of CPU, for all targets together")
    reader.add_argument("--within", type=float, default=math.inf, help="minutes that each target may take at most")
    reader.add_argument("--first", type=int, default=0, help="seed of the first round")
    reader.add_argument("--output", type=Path, default=Path("fuzz"), help="folder for reports and cases that kill")
    reader.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = reader.parse_args()
    seconds = 60 * asked.minutes / len(asked.targets)
    if asked.inside:
        faulthandler.enable()
        with tempfile.TemporaryDirectory(dir=asked.output) as folder:
            report = fuzz(asked.targets[0], Path(folder), seconds, first=asked.first, within=60 * asked.within)
        print(json.dumps(report, indent=1))
        return 1 if report["findings"] else 0
    asked.output.mkdir(parents=True, exist_ok=True)
    bad = 0
    for name in asked.targets:
        where = asked.output / name
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        again = ["--inside", "--minutes", str(seconds / 60), "--within", str(asked.within)]
        again += ["--first", str(asked.first), "--output", str(where)]
        with (where / "report.json").open("w") as report:
            code = subprocess.run([sys.executable, "-m", "hardening.fuzz", name, *again], stdout=report).returncode
        bad += code != 0
        text = (where / "report.json").read_text()
        if code < 0 or not text:
            print(f"{name}: ended with {code}; the case is {next(where.rglob('current.pickle'), None)}", flush=True)
            continue
        found = json.loads(text)
        findings = found.pop("findings")
        print(json.dumps(found), *findings, sep="\n", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
