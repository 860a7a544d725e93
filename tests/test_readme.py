"""Every command in the README and the documentation runs; those that cannot run here are listed with the reason."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny_folder
from PIL import Image
from ports import own_port
from typer.testing import CliRunner

from odevit_serve import bundle
from odevit_serve.cli import app
from odevit_serve.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
SKIPPED = {  # the start of a command -> why it is not run here
    "pip install": "changes the environment; tests/test_package.py installs the wheel",
    "pip uninstall": "changes the environment",
    "pytest": "that is this",
    "npm --prefix demo/embed": "tests/demo/test_embed.py installs the packages and drives the page",
    "apt install": "changes the machine",
    "cc -O2 -o predict demo/embed/c": "tests/demo/test_embed.py compiles it and runs it",
    "djpeg img.jpg": "of a package that is not installed here",
    "./predict": "tests/demo/test_embed.py compiles it and runs it",
    "node demo/embed": "tests/demo/test_embed.py runs it with the packages installed",
    "odevit-serve serve --ray": "tests/serving/test_ray.py runs it",
    "odevit-serve serve photos cifar10": "tests/serving/test_repository.py serves several",
    "odevit-serve predict photos/ --output answers.parquet --ray": "tests/offline/test_run.py runs it",
    "ODEVIT_API_KEY=... serve run odevit_serve.serving.ray": "tests/serving/test_ray.py runs the same application",
    "odevit-serve benchmark": "takes minutes; tests/benchmark runs it small",
    "odevit-serve analyze": "takes minutes; tests/train/analysis runs it small",
    "odevit-serve demo": "test_the_example_for_programs starts it and stops it",
    "odevit-serve push": "tests/test_hub.py pushes to a local fake of the Hub",
    "odevit-serve predict --model hf:": "tests/test_hub.py reads from a local fake of the Hub",
    "odevit-serve export --precision int8": "whether 8 bits pass depends on the model; tests/export/test_precision.py",
}
SERVERS = ("odevit-serve serve",)
NAMES = {"BUNDLE": "bundle", "FOLDER": "photos/", "DATA": "photos/", "timm:NAME": "timm:vit_tiny_patch16_224"}


def commands(page: str) -> list[str]:
    """The commands of a page in their order, without comments; lines that go on are joined."""
    found: list[str] = []
    for kind, body in re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE):
        lines = body.replace("\\\n", " ").splitlines()
        if kind == "sh":
            found += lines
        elif kind == "console":
            found += [line[2:] for line in lines if line.startswith("$ ")]
        elif kind == "":
            found += [line for line in lines if line.startswith("odevit-serve ")]
    return [re.sub(r"\s{2,}# .*$", "", line).strip() for line in found if line.strip()]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages take for granted: pictures, photos/, a bundle, and the examples."""
    folder = tmp_path_factory.mktemp("desk")
    models = folder / ".models"
    for name in ("photos", "cifar10"):
        tiny_folder(models / name)
        config = bundle.read_config(models / name)
        bundle.write_config(models / name, config.replace(name=name))
    random = np.random.default_rng(0)
    for index in range(520):
        place = folder / "photos" / config.labels[index % len(config.labels)]
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((16, 16), Image.Resampling.BICUBIC).save(place / f"{index}.png")
    for name in ("img.jpg", "image.jpg", "photo.jpg", "a.jpg", "b.png"):
        Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(folder / name)
    shutil.copytree(models / "cifar10", folder / "bundle")
    shutil.copytree(ROOT / "demo" / "examples", folder / "demo" / "examples")
    shutil.copytree(ROOT / "demo" / "embed", folder / "demo" / "embed", ignore=shutil.ignore_patterns("node_modules"))
    return folder


@contextmanager
def server(words: list[str], log: Path) -> Iterator[int]:
    """A server started by its command on a free port, and stopped as by Ctrl-C."""
    port = own_port()
    if "--port" in words:
        at = words.index("--port")
        del words[at : at + 2]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "odevit_serve", *words[1:], "--port", str(port)], stdout=output, stderr=output
        )
    until = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(
                f"http://127.0.0.1:{port}/{'v2/health/ready' if words[1] == 'serve' else ''}", timeout=5
            )
            break
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.3)
    try:
        yield port
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130), log.read_text()


def run(command: str, desk: Path) -> None:
    words = [NAMES.get(word, word) for word in shlex.split(command)]
    if words[:2] == ["odevit-serve", "train"]:  # teachers are downloaded and training takes long: the recipe is checked
        mine = desk / "runs" / "mine"
        if "--resume" not in words:
            shutil.rmtree(mine, ignore_errors=True)
        done = CliRunner().invoke(app, [*words[1:], "--dry-run"])
        if done.exit_code == 0 and not mine.exists():  # what the run would have left behind
            if "preset" in json.loads(done.stdout):
                shutil.copytree(desk / "bundle", mine / "bundle", ignore=shutil.ignore_patterns("*.onnx"))
                (mine / "recipe.json").write_text(done.stdout)
            else:
                shutil.copytree(desk / "bundle", mine)
                (mine / "training").mkdir()
    elif words[0] == "odevit-serve":
        done = CliRunner().invoke(app, words[1:])
    else:
        assert "pip" not in words, f"{command}: the environment of the tests is not changed"
        shell = command.replace("curl ", "curl -sSf ").replace("python ", f"{shlex.quote(sys.executable)} ", 1)
        finished = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
        assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
        return
    told = f": {done.exception}" if isinstance(done.exception, UserError) else ""
    assert done.exit_code == 0, f"{command}{told}\n{done.output}\n{done.exc_info}"


@pytest.mark.parametrize("page", PAGES)
def test_commands(
    page: str,
    desk: Path,
    monkeypatch: pytest.MonkeyPatch,
    traced_once: None,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setattr(bundle, "MODELS", desk / ".models")
    for path in desk.glob("*.onnx"):
        path.unlink()
    stops: list[Callable[[], object]] = []
    port = 8000
    try:
        for place, command in enumerate(commands(page)):
            if any(command.startswith(start) for start in SKIPPED):
                continue
            if command.startswith(SERVERS):
                started = server(shlex.split(command), tmp_path / f"log{place}")
                port = started.__enter__()
                stops.append(lambda started=started: started.__exit__(None, None, None))
                continue
            run(re.sub(r"127\.0\.0\.1:(8000|7860)", f"127.0.0.1:{port}", command), desk)
    finally:
        for stop in stops:
            stop()


def test_every_reason_to_skip_is_still_needed() -> None:
    everything = [command for page in PAGES for command in commands(page)]
    assert len(everything) > 30
    for start in SKIPPED:
        assert any(command.startswith(start) for command in everything), f"{start!r} is in no page any more"


def test_links_and_pictures_exist() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text()
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            if not target.startswith(("http:", "https:", "mailto:")):
                assert os.path.exists((ROOT / page).parent / target), f"{page}: {target}"


def test_the_example_for_programs(desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "demo.md").read_text(), re.DOTALL)
    with server(["odevit-serve", "demo", "--model", str(desk / "bundle")], tmp_path / "log") as port:
        names: dict[str, object] = {}
        exec(block.replace(":7860", f":{port}"), names)  # the page is ours
    assert names["full"]["steps"] == names["full"]["full_steps"]  # type: ignore[index]
    assert names["maps"]["step"] == 2  # type: ignore[index]
    assert names["rows"][0]["label"] == names["answer"]["label"]  # type: ignore[index]


def test_continuous_integration_runs_the_readmes_own_test_commands() -> None:
    block = re.search(r"Run the tests:\n\n```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    positions = [lines.index(line) for line in block[1].splitlines()]
    assert positions == sorted(positions)
