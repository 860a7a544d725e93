"""The exported file in other applications: the same class, steps and logits as in Python."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from browser import chromium, software_gpu
from PIL import Image

from odevit_serve import load

if TYPE_CHECKING:
    from playwright.sync_api import Page

EMBED = Path(__file__).resolve().parents[2] / "demo" / "embed"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "odevit-serve"
FORMATS = ("onnx", "onnx-adaptive")
HEADERS = "libonnxruntime-dev_1.21.0+dfsg-1_amd64.deb"  # of Debian 13: 85 kB, and any later library serves them
SHAPES = ((40, 30), (17, 33), (301, 200), (16, 16), (50, 90), (9, 12))


@pytest.fixture(scope="module")
def node_modules() -> Path:
    """The packages of demo/embed/package.json, in a folder that outlives the test run."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    home = Path(os.environ.get("ODEVIT_NODE_MODULES") or CACHE / "node")
    wanted = (EMBED / "package.json").read_text()
    stamp = home / "package.json"
    if not stamp.is_file() or stamp.read_text() != wanted:
        home.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="node-", dir=home.parent))
        (scratch / "package.json").write_text(wanted)
        # Scripts would fetch what the packages bring already, from other places than the registry.
        done = subprocess.run(
            ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"],
            cwd=scratch,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        shutil.rmtree(home, ignore_errors=True)
        scratch.rename(home)
    return home / "node_modules"


@pytest.fixture(scope="module")
def application(node_modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples as a user has them after `npm install`."""
    folder = tmp_path_factory.mktemp("embed") / "embed"
    shutil.copytree(EMBED, folder, ignore=shutil.ignore_patterns("node_modules", "model.onnx"))
    shutil.copytree(EMBED.parent / "examples", folder.parent / "examples")
    (folder / "node_modules").symlink_to(node_modules)
    return folder


@pytest.fixture(scope="module")
def exported(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    from odevit_serve.export.job import Settings, export

    folder = tmp_path_factory.mktemp("exported")

    @functools.cache
    def make(kind: str) -> Path:
        path = folder / f"{kind}.onnx"
        settings = Settings(format=kind, output=str(path), with_attention=kind == "onnx")
        export(str(tiny_bundle), settings, lambda _: None)
        return path

    return make


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(5)
    paths = []
    for width, height in SHAPES:
        coarse = Image.fromarray(random.integers(0, 256, (height // 6 + 2, width // 6 + 2, 3), dtype=np.uint8))
        paths.append(folder / f"{width}x{height}.png")
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(paths[-1])
    return paths


def check(file: Path, bundle: Path, picture: Path, answer: dict[str, object]) -> None:
    """Against the file in this package, and against the bundle it was made of."""
    model = load(file)
    logits = model.session.run(["logits"], {"pixel_values": model.prepare(picture)[None]})[0][0]
    np.testing.assert_allclose(answer["logits"], logits, rtol=0, atol=1e-3)
    mine = model.predict(picture)
    full = load(bundle).predict(picture, adaptive="adaptive" in file.name)
    assert (answer["label"], answer["steps"]) == (mine.label, mine.steps) == (full.label, full.steps)


def lines(words: list[str | Path], pictures: list[Path]) -> list[dict[str, object]]:
    done = subprocess.run([*map(str, words), *map(str, pictures)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kind", FORMATS)
def test_python(kind: str, exported: Callable[[str], Path], tiny_bundle: Path, pictures: list[Path]) -> None:
    answers = lines([sys.executable, EMBED / "python" / "predict.py", exported(kind)], pictures)
    for picture, answer in zip(pictures, answers, strict=True):
        check(exported(kind), tiny_bundle, picture, answer)
    if kind == "onnx-adaptive":
        assert len({answer["steps"] for answer in answers}) > 1  # else equal depths would prove nothing


def test_python_is_short_and_needs_three_packages() -> None:
    source = (EMBED / "python" / "predict.py").read_text()
    assert len(source.splitlines()) < 40
    imports = {line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert imports == {"json", "sys", "numpy", "onnxruntime", "PIL"}


@pytest.mark.parametrize("kind", FORMATS)
def test_node(
    kind: str, application: Path, exported: Callable[[str], Path], tiny_bundle: Path, pictures: list[Path]
) -> None:
    answers = lines(["node", application / "node" / "predict.mjs", exported(kind)], pictures)
    for picture, answer in zip(pictures, answers, strict=True):
        check(exported(kind), tiny_bundle, picture, answer)


@pytest.fixture(scope="module")
def headers() -> Path:
    """The folder of onnxruntime_c_api.h: that of the system, else from Debian's package, kept for the next test run."""
    system = Path("/usr/include/onnxruntime")
    if (system / "onnxruntime_c_api.h").is_file():
        return system
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("needs onnxruntime's headers, or apt to get them")
    home = CACHE / HEADERS
    if not home.is_dir():
        words = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
        listed = subprocess.run(words, capture_output=True, text=True).stdout.split()
        mirrors = [address for address in listed if address.endswith("/debian/")]
        if not mirrors:
            pytest.skip("needs onnxruntime's headers, or a mirror of Debian")
        home.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="headers-", dir=home.parent))
        try:
            with urllib.request.urlopen(f"{mirrors[0]}pool/main/o/onnxruntime/{HEADERS}", timeout=30) as answer:
                (scratch / HEADERS).write_bytes(answer.read())
        except (urllib.error.URLError, TimeoutError) as error:
            pytest.skip(f"needs onnxruntime's headers, and {HEADERS} is not available: {error}")
        subprocess.run(["dpkg-deb", "-x", scratch / HEADERS, scratch], check=True)
        scratch.replace(home)
    return home / "usr/include/onnxruntime"


@pytest.fixture(scope="module")
def program(headers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in C, compiled against the headers and linked with the library of the onnxruntime wheel."""
    import onnxruntime

    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("c")
    [library] = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):  # what the linker and the loader look for
        (folder / name).symlink_to(library)
    words = [compiler, "-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{headers}", EMBED / "c" / "predict.c"]
    words += ["-o", folder / "predict", f"-L{folder}", "-lonnxruntime", "-lm", f"-Wl,-rpath,{folder}"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "predict"


def as_ppm(picture: Path, folder: Path) -> Path:
    target = folder / f"{picture.stem}.ppm"
    Image.open(picture).save(target)
    return target


@pytest.mark.parametrize("kind", FORMATS)
def test_c(
    kind: str,
    program: Path,
    exported: Callable[[str], Path],
    tiny_bundle: Path,
    pictures: list[Path],
    tmp_path: Path,
) -> None:
    decoded = [as_ppm(picture, tmp_path) for picture in pictures]
    answers = lines([program, exported(kind)], decoded)
    for picture, answer in zip(pictures, answers, strict=True):
        check(exported(kind), tiny_bundle, picture, answer)
    if kind == "onnx-adaptive":
        assert len({answer["steps"] for answer in answers}) > 1
        assert {answer["steps"] for answer in lines([program, "--max-steps", "1", exported(kind)], decoded)} == {1}


def test_c_says_what_is_wrong(
    program: Path, exported: Callable[[str], Path], pictures: list[Path], tmp_path: Path
) -> None:
    short = as_ppm(pictures[0], tmp_path)
    short.write_bytes(b"P6 # a comment\n40 30\n255\n" + bytes(40 * 30 * 3 - 1))
    for words, said in (
        ([], "usage: predict [--max-steps N] MODEL.onnx PICTURE.ppm..."),
        ([exported("onnx"), pictures[0]], f"{pictures[0]}: is not a binary PPM file"),
        ([exported("onnx"), tmp_path / "none.ppm"], f"{tmp_path / 'none.ppm'}: cannot be opened"),
        ([exported("onnx"), short], f"{short}: is truncated"),
    ):
        done = subprocess.run([program, *map(str, words)], capture_output=True, text=True)
        assert (done.returncode, done.stderr.strip()) == (1, said)


def test_pictures_become_the_same_pixels_in_javascript(application: Path, tmp_path: Path) -> None:
    from odevit_serve.config import Preprocessing
    from odevit_serve.data import images

    random = np.random.default_rng(1)
    cases = []
    for kernel in ("bicubic", "bilinear", "lanczos"):
        for crop, mode in ((1.0, "center"), (0.9, "center"), (0.875, "squash")):
            transform = Preprocessing((3, 24, 24), (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), kernel, crop, mode)
            for width, height in ((31, 77), (77, 30), (24, 24), (10, 11)):
                array = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
                expected = images.prepare(Image.fromarray(array), transform)
                cases.append(
                    {
                        "picture": {"width": width, "height": height, "data": array.ravel().tolist()},
                        "transform": json.loads(json.dumps(vars(transform))),
                        "expected": expected.ravel().tolist(),
                    }
                )
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = f"""
        import {{ readFileSync }} from 'node:fs';
        import {{ prepare }} from '{application.as_uri()}/odevit.mjs';
        const cases = JSON.parse(readFileSync(process.argv[2]));
        const worst = cases.map(({{ picture, transform, expected }}) =>
          prepare(picture, transform).reduce((most, value, i) => Math.max(most, Math.abs(value - expected[i])), 0));
        console.log(JSON.stringify(worst));
    """
    (tmp_path / "compare.mjs").write_text(script)
    done = subprocess.run(
        ["node", str(tmp_path / "compare.mjs"), str(tmp_path / "cases.json")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert max(json.loads(done.stdout)) < 1e-5


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(application: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(application.parent))  # as `npm run browser` serves it
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Page]:
    with chromium() as browser:
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}/embed/browser/")
        yield page
        assert {url for url in asked if not url.startswith((address, "blob:", "data:"))} == set()
        assert [url for url in asked if url.endswith(".wasm")] != []
        assert not any("webgpu" in url for url in asked)  # this browser has no GPU


def upload(page: Page, kind: str, path: Path) -> None:
    page.set_input_files(f"#{kind}", path)
    page.wait_for_function(
        "([id, name]) => document.getElementById(id + '-name').textContent === name"
        " && !document.getElementById('message').textContent.endsWith('...')",
        arg=[kind, path.name],
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_browser(
    kind: str, page: Page, exported: Callable[[str], Path], tiny_bundle: Path, pictures: list[Path]
) -> None:
    upload(page, "model", exported(kind))
    for picture in pictures:
        upload(page, "picture", picture)
        answer = page.evaluate("window.answer()")
        check(exported(kind), tiny_bundle, picture, answer)
        assert page.inner_text("#label") == answer["label"]
        assert page.inner_text("#depth").startswith(f"{answer['steps']} of {answer['full']} steps")
    assert page.is_visible("#heat-control") == (kind == "onnx")


def test_browser_takes_what_is_dropped_and_survives_a_wrong_file(
    page: Page, exported: Callable[[str], Path], pictures: list[Path]
) -> None:
    upload(page, "model", exported("onnx"))
    drop = """async ([bytes, name]) => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(bytes)], name));
        document.getElementById('picture-drop').dispatchEvent(new DragEvent('drop', { dataTransfer: data }));
    }"""
    page.evaluate(drop, [list(b"no picture"), "wrong.png"])
    page.wait_for_selector("#message.wrong")
    assert "wrong.png is not a picture" in page.inner_text("#message")
    page.evaluate(drop, [list(pictures[0].read_bytes()), "dropped.png"])
    page.wait_for_function("() => document.getElementById('picture-name').textContent === 'dropped.png'")
    page.wait_for_function("() => document.getElementById('message').textContent === ''")
    before = page.evaluate("document.getElementById('map').toDataURL()")
    page.fill("#opacity", "0")
    assert page.evaluate("document.getElementById('map').toDataURL()") != before  # the map was there, and goes
    page.set_input_files("#model", pictures[0])
    page.wait_for_selector("#message.wrong")
    assert "is not an exported ODE-ViT" in page.inner_text("#message")


def test_one_click_shows_the_model_beside_the_page_on_a_photograph(
    page: Page, address: str, application: Path, exported: Callable[[str], Path], tiny_bundle: Path
) -> None:
    pictures = sorted((application.parent / "examples").glob("*.jpg"))
    page.goto(f"{address}/embed/browser/")
    assert page.eval_on_selector_all("#examples img", "all => all.map(i => i.getAttribute('src'))") == [
        f"../../examples/{path.name}" for path in pictures
    ]
    page.click("#examples button >> nth=1")
    page.wait_for_selector("#message.wrong")
    assert page.inner_text("#message").startswith("There is no model.onnx beside this page: odevit-serve export")
    model = application / "browser" / "model.onnx"
    shutil.copyfile(exported("onnx-adaptive"), model)
    try:
        page.click("#examples button >> nth=1")
        page.wait_for_selector("#answer:not([hidden])")
        check(exported("onnx-adaptive"), tiny_bundle, pictures[1], page.evaluate("window.answer()"))
        assert page.inner_text("#time").endswith(" ms on WebAssembly")
    finally:
        model.unlink()


@pytest.mark.slow
def test_webgpu(
    page: Page, address: str, exported: Callable[[str], Path], tiny_bundle: Path, pictures: list[Path]
) -> None:
    """By the adapter in software that Chromium brings: the same answers. It is only taken when it is asked for."""
    with software_gpu(page) as browser:
        page = browser.new_page()
        page.set_default_timeout(240_000)  # milliseconds: shaders are compiled, and then computed by the CPU
        page.goto(f"{address}/embed/browser/?device=webgpu")
        if not page.evaluate("async () => Boolean(await navigator.gpu?.requestAdapter())"):
            pytest.skip("needs a Chromium with an adapter for WebGPU")
        upload(page, "model", exported("onnx-adaptive"))
        upload(page, "picture", pictures[0])
        check(exported("onnx-adaptive"), tiny_bundle, pictures[0], page.evaluate("window.answer()"))
        assert page.inner_text("#time").endswith(" ms on WebGPU")
        page.goto(f"{address}/embed/browser/")
        upload(page, "model", exported("onnx-adaptive"))
        upload(page, "picture", pictures[0])
        assert page.inner_text("#time").endswith(" ms on WebAssembly")
