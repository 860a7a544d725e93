"""The page in a real browser, and its endpoints for programs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
from browser import chromium
from PIL import Image
from ports import own_port

from odevit_serve import load

if TYPE_CHECKING:
    from gradio_client import Client
    from playwright.sync_api import Browser, BrowserContext, Page

WAIT = 60_000


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def address(tiny_bundle: Path, temporary: Path) -> Iterator[str]:
    port = own_port()
    command = [sys.executable, "-m", "odevit_serve", "demo", "--port", str(port), "--model", str(tiny_bundle)]
    log = (temporary / "log").open("w")
    server = subprocess.Popen(
        [*command, "--threads", "1"], stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(temporary)}
    )
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(url, timeout=5)
            break
        except OSError:
            assert server.poll() is None, (temporary / "log").read_text()
            assert time.monotonic() < until, (temporary / "log").read_text()
            time.sleep(0.3)
    yield url
    server.send_signal(signal.SIGINT)
    assert server.wait(30) in (0, 130)
    assert not list(temporary.glob("odevit-demo-*"))  # nothing of what visitors sent stays


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    paths = []
    for seed in range(6):
        coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        paths.append(folder / f"picture{seed}.png")
        Image.fromarray(coarse).resize((60, 48), Image.Resampling.BICUBIC).save(paths[-1])
    return paths


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wrong") / "notes.png"
    path.write_text("this is no picture")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    yield context
    context.close()


def visit(context: BrowserContext, address: str) -> Page:
    page = context.new_page()
    page.set_default_timeout(WAIT)
    page.goto(address)
    page.wait_for_selector("#picture input[type=file]", state="attached")
    return page


def upload(page: Page, path: Path, where: str = "picture") -> None:
    page.set_input_files(f"#{where} input[type=file]", path)


def steps(page: Page, place: str = "answer") -> int:
    return int(page.inner_text(f"#{place} .count").split("/")[0])


def answered(page: Page, count: int) -> None:
    """Wait until so many steps are shown."""
    page.wait_for_function(
        "n => document.querySelector('#answer .count')?.innerText.split('/')[0].trim() == String(n)", arg=count
    )


def number(page: Page, name: str, value: float) -> None:
    box = page.locator(f"#{name} input[type=number]")
    box.fill(str(value))
    box.press("Tab")


def choose(page: Page, name: str, option: str) -> None:
    page.click(f"#{name} input")
    page.get_by_role("option", name=option, exact=True).click()


def test_a_picture_is_answered(context: BrowserContext, address: str, tiny_bundle: Path, pictures: list[Path]) -> None:
    asked: list[str] = []
    errors: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.close()
    page = visit(context, address)
    page.on("pageerror", lambda error: errors.append(str(error)))
    upload(page, pictures[1])
    page.wait_for_selector("#answer-label")
    alone = load(tiny_bundle).predict(pictures[1])
    assert page.inner_text("#answer-label") == alone.label
    assert steps(page) == alone.steps
    assert alone.steps < alone.full_steps
    assert f"Stopped early at step {alone.steps} of {alone.full_steps}" in page.inner_text("#answer")
    assert page.locator("#answer .gauge i.on").count() == alone.steps
    assert page.locator("#answer .gauge i").count() == alone.full_steps
    assert "less" in page.inner_text("#answer .costs")
    assert page.locator("#plots svg").count() == 6
    unnamed = page.evaluate("[...document.querySelectorAll('img')].filter(i => i.offsetParent && !i.alt).length")
    assert unnamed == 0
    assert page.locator("#plots svg:not([aria-label])").count() == 0
    assert {url for url in asked if not url.startswith((address, "data:", "blob:"))} == set()
    assert errors == []


def test_the_slider_moves_the_map(context: BrowserContext, address: str, pictures: list[Path]) -> None:
    page = visit(context, address)
    upload(page, pictures[1])
    page.wait_for_selector("#heat img")
    at_exit = page.get_attribute("#heat img", "src")
    assert page.get_attribute("#heat img", "data-step") == str(steps(page))
    number(page, "moment", 0)
    page.wait_for_selector("#heat img[data-step='0']")
    at_start = page.get_attribute("#heat img", "src")
    assert at_start != at_exit
    assert "after step 0" in (page.get_attribute("#heat img", "alt") or "")
    page.focus("#moment input[type=range]")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#heat img[data-step='1']")
    choose(page, "head", "head 2")
    page.wait_for_selector("#heat img[alt*='head 2']")
    of_head = page.get_attribute("#heat img", "src")
    number(page, "opacity", 0)
    page.wait_for_function("old => document.querySelector('#heat img').src !== old", arg=of_head)


def test_play_shows_every_map_in_turn(context: BrowserContext, address: str, pictures: list[Path]) -> None:
    page = visit(context, address)
    upload(page, pictures[1])
    page.wait_for_selector("#heat img")
    page.evaluate(
        """() => {
            window.seen = [];
            new MutationObserver(() => {
                const step = document.querySelector('#heat img')?.dataset.step;
                if (step !== undefined && step !== window.seen.at(-1)) window.seen.push(step);
            }).observe(document.querySelector('#heat'), { childList: true, subtree: true, attributes: true });
        }"""
    )
    page.click("#play")
    page.wait_for_function("() => window.seen.at(-1) === '8'")
    assert page.evaluate("window.seen")[-9:] == [str(step) for step in range(9)]
    assert page.input_value("#moment input[type=number]") == "8"


def test_settings_change_the_depth(
    context: BrowserContext, address: str, tiny_bundle: Path, pictures: list[Path]
) -> None:
    model = load(tiny_bundle)
    full = model.config.integration.steps
    page = visit(context, address)
    page.wait_for_selector("#one-guarantee :text('No guarantee')")  # the bundle of the tests has no calibration
    upload(page, pictures[1])
    page.wait_for_selector("#answer-label")
    usual = steps(page)
    number(page, "one-threshold", 0.0)
    answered(page, 1)
    number(page, "one-threshold", 2.0)
    answered(page, model.predict(pictures[1], threshold=2.0).steps)
    assert steps(page) > usual
    number(page, "one-depth", 2)
    answered(page, 2)
    assert "number of steps allowed" in page.inner_text("#answer")
    number(page, "one-depth", full)
    page.click("#one-adaptive input")
    answered(page, full)
    page.wait_for_selector("#one-guarantee :text('Full depth')")
    number(page, "one-steps", full + 3)
    answered(page, full + 3)
    cost = "document.querySelectorAll('#answer .costs thead span')[1].innerText"
    before = page.evaluate(f"parseFloat({cost})")
    choose(page, "one-solver", "rk4")  # four evaluations a step
    page.wait_for_function(f"before => parseFloat({cost}) > 3 * before", arg=before)
    page.click("#one-adaptive input")
    choose(page, "one-rule", "patience")
    page.wait_for_function("document.querySelector('#answer')?.innerText.includes(\"'patience'\")")


def test_a_wrong_file_is_told_and_the_page_goes_on(
    context: BrowserContext, address: str, pictures: list[Path], wrong: Path
) -> None:
    page = visit(context, address)
    upload(page, wrong)
    page.wait_for_selector("#answer .wrong")
    assert "is not a picture" in page.inner_text("#answer .wrong")
    assert "/" not in page.inner_text("#answer .wrong")  # no path of the server
    page.click("#picture button[aria-label='Remove Image']")
    upload(page, pictures[0])
    page.wait_for_selector("#answer-label")


def test_a_phone(browser: Browser, address: str, pictures: list[Path]) -> None:
    context = browser.new_context(viewport={"width": 375, "height": 740}, color_scheme="dark", has_touch=True)
    page = visit(context, address)
    upload(page, pictures[2])
    page.wait_for_selector("#answer-label")
    page.wait_for_selector("#plots svg")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    for part in ("#answer", "#heat img", "#plots svg >> nth=0"):
        box = page.locator(part).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 375
        assert box["width"] > 250
    ink = page.evaluate("getComputedStyle(document.querySelector('#answer-label')).color")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert contrast(ink, ground) > 7
    context.close()


def contrast(*colors: str) -> float:
    """Of two CSS colours, as WCAG counts it."""

    def light(color: str) -> float:
        parts = [float(part) / 255 for part in re.findall(r"[\d.]+", color)[:3]]
        red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, bright = sorted(map(light, colors))
    return (bright + 0.05) / (dark + 0.05)


def test_two_visitors_at_once(browser: Browser, address: str, tiny_bundle: Path, pictures: list[Path]) -> None:
    contexts = [browser.new_context() for _ in range(2)]
    pages = [visit(context, address) for context in contexts]
    number(pages[1], "one-threshold", 0.0)
    for page, path in zip(pages, pictures[1:3]):
        upload(page, path)
    for page in pages:
        page.wait_for_selector("#answer-label")
    model = load(tiny_bundle)
    assert pages[0].inner_text("#answer-label") == model.predict(pictures[1]).label
    assert steps(pages[0]) == model.predict(pictures[1]).steps
    answered(pages[1], 1)
    assert pages[1].inner_text("#answer-label") == model.predict(pictures[2], threshold=0.0).label
    first = pages[0].get_attribute("#heat img", "src")
    number(pages[1], "moment", 0)
    pages[1].wait_for_selector("#heat img[data-step='0']")
    assert pages[0].get_attribute("#heat img", "src") == first
    for context in contexts:
        context.close()


def test_side_by_side(context: BrowserContext, address: str, tiny_bundle: Path, pictures: list[Path]) -> None:
    page = visit(context, address)
    page.get_by_role("tab", name="Side by side").click()
    upload(page, pictures[1], "picture-two")
    page.wait_for_selector("#right-answer .count")
    alone = load(tiny_bundle).predict(pictures[1])
    assert (steps(page, "left-answer"), steps(page, "right-answer")) == (alone.steps, alone.full_steps)


def test_many_pictures(
    context: BrowserContext, address: str, tiny_bundle: Path, pictures: list[Path], wrong: Path
) -> None:
    page = visit(context, address)
    page.get_by_role("tab", name="Many pictures").click()
    page.set_input_files("#files input[type=file]", [*pictures, wrong])
    page.wait_for_selector("#histogram svg")
    alone = load(tiny_bundle).predict(pictures)
    assert len({p.steps for p in alone}) > 1
    text = page.inner_text("#batch-summary")
    assert text.startswith(f"{len(pictures)} answered, {np.mean([p.steps for p in alone]):.2f} of")
    assert "1 could not be read" in text
    titles = page.eval_on_selector_all("#histogram rect title", "all => all.map(t => t.textContent)")
    counts = np.bincount([p.steps for p in alone], minlength=alone[0].full_steps + 1)[1:]
    assert titles == [f"{count} at step {step}" for step, count in enumerate(counts, 1)]
    table = page.inner_text("#table")
    assert "is not a picture" in table
    assert all(path.name in table for path in pictures)


@pytest.fixture(scope="module")
def client(address: str) -> Client:
    from gradio_client import Client

    return Client(address, verbose=False)


def test_programs_can_call_it(client: Client, tiny_bundle: Path, pictures: list[Path], wrong: Path) -> None:
    from gradio_client import handle_file

    alone = load(tiny_bundle).predict(pictures[1])
    answer = client.predict(handle_file(str(pictures[1])), api_name="/predict")
    assert (answer["label"], answer["steps"], answer["full_steps"]) == (alone.label, alone.steps, alone.full_steps)
    forced = client.predict(handle_file(str(pictures[1])), adaptive=False, api_name="/predict")
    assert forced["steps"] == alone.full_steps
    maps = client.predict(handle_file(str(pictures[1])), step=2, api_name="/attention")
    np.testing.assert_allclose(maps["heads"], load(tiny_bundle).attention(pictures[1], step=2).heads, atol=1e-4)
    rows = client.predict([handle_file(str(p)) for p in (*pictures[:2], wrong)], api_name="/batch")
    assert [row.get("steps") for row in rows] == [p.steps for p in load(tiny_bundle).predict(pictures[:2])] + [None]
    assert set(client.view_api(return_format="dict")["named_endpoints"]) == {"/predict", "/attention", "/batch"}
    jobs = [client.submit(handle_file(str(p)), api_name="/predict") for p in pictures]
    assert [job.result(60)["label"] for job in jobs] == [p.label for p in load(tiny_bundle).predict(pictures)]


def test_programs_are_told_what_is_wrong(client: Client, pictures: list[Path], wrong: Path) -> None:
    from gradio_client import handle_file
    from gradio_client.exceptions import AppError

    with pytest.raises(AppError, match="is not a picture"):
        client.predict(handle_file(str(wrong)), api_name="/predict")
    with pytest.raises(AppError, match="/etc is not in the list"):
        client.predict(handle_file(str(pictures[0])), model="/etc", api_name="/predict")


def test_nothing_else_on_the_machine_can_be_read(
    address: str, tiny_bundle: Path, temporary: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.png"
    Image.new("RGB", (20, 20)).save(secret)
    for path in (secret, tiny_bundle / "config.json", Path("/etc/passwd"), Path(__file__)):
        for url in (f"{address}/gradio_api/file={path}", f"{address}/file={path}"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(url)
            assert refused.value.code in (403, 404)
    sent = {"path": str(secret), "meta": {"_type": "gradio.FileData"}}
    call = f"{address}/gradio_api/call/predict"
    event = httpx.post(call, json={"data": [sent, None, True, None, 1, None, None, None]}).json()["event_id"]
    answer = httpx.get(f"{call}/{event}", timeout=60).text
    assert "event: error" in answer
    assert "label" not in answer
    assert any(path.name.startswith("odevit-demo-") for path in temporary.iterdir())


def test_large_files_and_foreign_sources_are_refused(address: str) -> None:
    with urllib.request.urlopen(address) as page:
        policy = page.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "https:" not in policy
        assert not re.search(r'<(script|link)[^>]+(src|href)="https?://(?!127)', page.read().decode())
    big = httpx.post(f"{address}/gradio_api/upload", files={"files": ("big.png", b"x" * (17 * 2**20))}, timeout=60)
    assert big.status_code == 413
    small = httpx.post(f"{address}/gradio_api/upload", files={"files": ("small.png", b"x" * 1000)}, timeout=60)
    assert small.status_code == 200


def test_what_the_page_cannot_show_is_told_at_the_start(tmp_path: Path) -> None:
    from odevit_serve.demo.page import Models
    from odevit_serve.errors import UserError

    (tmp_path / "x.onnx").write_bytes(b"")
    with pytest.raises(UserError, match="give the bundle"):
        Models([str(tmp_path / "x.onnx")])
    command = [sys.executable, "-m", "odevit_serve", "demo", "--model", str(tmp_path / "nowhere")]
    none = subprocess.run(command, capture_output=True, text=True)
    assert none.returncode == 1
    assert "nowhere" in none.stderr
    assert "Traceback" not in none.stderr


def test_an_address_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradio takes a file by its path, and downloads a path that is an address, of any size."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    import gradio as gr
    from gradio import processing_utils

    from odevit_serve.demo.app import _picture, _uploads_only

    asked: list[str] = []

    async def download(url: str, cache_dir: str) -> str:
        asked.append(url)
        return cache_dir

    monkeypatch.setattr(processing_utils, "async_ssrf_protected_download", download)
    with gr.Blocks():
        components = [_picture("one", 100), _uploads_only(gr.File(file_count="multiple"))]
    for component in components:
        payload = {"path": "https://files.example/huge.png", "meta": {"_type": "gradio.FileData"}}
        moved = processing_utils.async_move_files_to_cache(payload, component, check_in_upload_folder=True)
        with ThreadPoolExecutor(1) as other:  # the browser's driver has a loop on this thread
            error = other.submit(asyncio.run, moved).exception()
        assert isinstance(error, gr.Error)
        assert "addresses are not opened" in str(error)
    assert asked == []
