"""How the page looks and is served: one picture, two settings side by side, many pictures. page.py has the answers."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import gradio as gr
from gradio_client.utils import is_http_url_like
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .page import EMPTY, MAX_BATCH, Controls, Models, Page

C = TypeVar("C", bound=gr.components.Component)
HERE = Path(__file__).parent
EXAMPLES = HERE / "examples"
MAX_FILE = "16mb"
AT_ONCE = 8  # visitors whose pictures are worked on; a picture holds a thread of the page, not one of the engine
WAITING = 64  # visitors in line before the page says that it is busy
KEEP = 3600  # seconds that a visitor's picture and numbers are kept
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' ws: wss: data: blob:; "
    "worker-src 'self' blob:; media-src 'self' data: blob:; frame-ancestors 'self'"
)

# gradio shows examples without a word for those who cannot see them.
NAMES = """
new MutationObserver(() => document.querySelectorAll('img:not([alt]), img[alt=""]').forEach((image) => {
  const name = decodeURIComponent(image.src).split('/').pop().replace(/[.][a-z]+$/, '');
  if (image.src && !image.src.startsWith('data:')) image.alt = 'Example: ' + name;
})).observe(document, { childList: true, subtree: true, attributes: true, attributeFilter: ['src'] });
"""


def _picture(name: str, height: int) -> gr.Image:
    """An input that hands over the file as it was sent, so that reading it, and what is said of a bad one, is ours.

    A subclass would do this more plainly, but gradio writes a stub file beside each module that holds one.
    """
    image = gr.Image(
        type="filepath",
        label="Picture",
        sources=["upload", "webcam", "clipboard"],
        height=height,
        elem_id=name,
        alt_text="The picture you chose",
        buttons=[],
    )
    image.preprocess = lambda payload: None if payload is None else payload.path  # type: ignore[method-assign, assignment]
    return _uploads_only(image)


def _uploads_only(component: C) -> C:
    """Take files that were sent, within their size limit; gradio would download an address that is given as a path."""
    move = component.async_move_resource_to_block_cache

    async def local(path: str | Path | None) -> str | None:
        if path is not None and is_http_url_like(str(path)):
            raise gr.Error("addresses are not opened: send the file itself", print_exception=False)
        return await move(path)

    component.async_move_resource_to_block_cache = local  # type: ignore[method-assign, assignment]
    return component


def _controls(page: Page, prefix: str, **first: Any) -> tuple[Controls[Any], gr.Markdown]:
    """The inputs, and the place where the guarantee that belongs to them is told."""
    start = page.defaults(page.models.default)

    def name(part: str) -> str:
        return f"{prefix}-{part}"

    model = gr.Dropdown(**start.model, label="Model", elem_id=name("model"))
    adaptive = gr.Checkbox(
        **{**start.adaptive, **first}, label="Stop early (adaptive depth)", elem_id=name("adaptive"), container=False
    )
    with gr.Row():
        rule = gr.Dropdown(**start.rule, label="Exit rule", min_width=140, elem_id=name("rule"))
        threshold = gr.Slider(**start.threshold, min_width=180, elem_id=name("threshold"))
    words = gr.Markdown(elem_id=name("guarantee"), elem_classes="guarantee")
    with gr.Row():
        solver = gr.Dropdown(**start.solver, label="Solver", min_width=140, elem_id=name("solver"))
        steps = gr.Slider(1, **start.steps, step=1, label="Steps", min_width=180, elem_id=name("steps"))
    limit = gr.Slider(1, **start.max_steps, step=1, label="Maximal depth", elem_id=name("depth"))
    return Controls(model, adaptive, rule, threshold, limit, solver, steps), words


QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}


def _wire(
    page: Page,
    controls: Controls[Any],
    words: gr.Markdown,
    answer: Callable[..., Any],
    inputs: list[Any],
    outputs: list[Any],
) -> None:
    """A changed control first sets the others right, then gives a new answer."""
    c = controls
    then = {"fn": answer, "inputs": inputs, "outputs": outputs, **QUIET}
    told = {"fn": page.words, "inputs": c.settings, "outputs": words, **QUIET}
    adjusted = c.settings[1:]
    c.model.input(page.for_model, c.model, adjusted, **QUIET).then(**told).then(**then)
    c.rule.input(page.for_rule, [c.model, c.rule, c.steps], c.threshold, **QUIET).then(**told).then(**then)
    c.steps.input(page.for_steps, c.steps, c.max_steps, trigger_mode="always_last", **QUIET).then(**told).then(**then)
    for control in (c.adaptive, c.threshold, c.max_steps, c.solver):
        control.input(**told, trigger_mode="always_last").then(**then)


def build(models: Models) -> gr.Blocks:
    """The page."""
    page = Page(models)
    with gr.Blocks(title="ODE-ViT", analytics_enabled=False, delete_cache=(KEEP, KEEP)) as blocks:
        gr.HTML(
            '<div class="intro"><h1>ODE-ViT: as deep as the picture needs</h1><p>One transformer block, integrated as '
            "a differential equation. After each step there is an answer; integration ends early once a calibrated "
            "criterion expects that answer to be the one at full depth.</p></div>",
            elem_classes="page",
        )
        state = gr.State(time_to_live=KEEP)
        with gr.Tab("One picture", id="one"):
            with gr.Row():
                with gr.Column(scale=4, min_width=300):
                    picture = _picture("picture", 300)
                    examples = sorted(str(p) for p in EXAMPLES.glob("*.jpg"))
                    if examples:
                        gr.Examples(examples, picture, label="Examples", api_visibility="private")
                with gr.Column(scale=5, min_width=300):
                    answer = gr.HTML(EMPTY, elem_id="answer", elem_classes="page")
            with gr.Row():
                with gr.Column(scale=4, min_width=300):
                    gr.Markdown("### Settings")
                    controls, words = _controls(page, "one")
                with gr.Column(scale=5, min_width=300):
                    gr.Markdown("### Where CLS looks")
                    heat = gr.HTML(elem_id="heat", elem_classes="page")
                    steps = models.config(models.default).integration.steps
                    moment = gr.Slider(0, steps, steps, step=1, label="Time: after step", elem_id="moment")
                    play = gr.Button("Play the trajectory", size="sm", elem_id="play")
                    with gr.Row():
                        head = gr.Dropdown(["mean"], value="mean", label="Head", min_width=120, elem_id="head")
                        opacity = gr.Slider(
                            0, 1, 0.55, step=0.05, label="Opacity of the map", min_width=180, elem_id="opacity"
                        )
            gr.Markdown("### The trajectory")
            ways = gr.HTML(elem_id="plots", elem_classes="page")
            inputs, outputs = [picture, head, opacity, *controls.settings], [state, answer, heat, ways, moment, head]
            picture.change(
                page.analyze,
                inputs,
                outputs,
                api_visibility="private",
                show_progress="minimal",
                show_progress_on=answer,
            )
            _wire(page, controls, words, page.analyze, inputs, outputs)
            for control in (moment, head, opacity):
                control.input(
                    page.map, [state, moment, head, opacity], heat, trigger_mode="always_last", queue=False, **QUIET
                )
            play.click(page.play, [state, head, opacity], [moment, heat], trigger_mode="once", **QUIET)
            blocks.load(page.words, controls.settings, words, **QUIET)

        with gr.Tab("Side by side", id="two"):
            with gr.Row():
                other = _picture("picture-two", 260)
            with gr.Row():
                sides = []
                for name, first in (("left", {}), ("right", {"value": False})):
                    with gr.Column(min_width=300):
                        with gr.Accordion("Settings on the " + name, open=True):
                            own, told = _controls(page, name, **first)
                        sides.append((own, told, gr.HTML(EMPTY, elem_id=f"{name}-answer", elem_classes="page")))
            both = [other, *sides[0][0].settings, *sides[1][0].settings]
            shown = [sides[0][2], sides[1][2]]
            other.change(page.compare, both, shown, api_visibility="private", show_progress="minimal")
            for own, told, _ in sides:
                _wire(page, own, told, page.compare, both, shown)
                blocks.load(page.words, own.settings, told, **QUIET)

        with gr.Tab("Many pictures", id="many"):
            gr.Markdown(
                f"Up to {MAX_BATCH} pictures, with the settings of the first tab; they share the batches of the engine."
            )
            files = _uploads_only(gr.File(file_count="multiple", label="Pictures", elem_id="files", height=160))
            summary = gr.Markdown(elem_id="batch-summary")
            bars = gr.HTML(elem_id="histogram", elem_classes="page")
            table = gr.Dataframe(
                headers=["picture", "answer", "probability", "steps", "how it ended"],
                datatype=["str", "str", "str", "number", "str"],
                interactive=False, wrap=True, label="Answers", elem_id="table",
            )  # fmt: skip
            files.change(
                page.many,
                [files, *controls.settings],
                [table, bars, summary],
                api_visibility="private",
                show_progress="minimal",
            )

        _endpoints(page, picture, files, controls)
    blocks.queue(max_size=WAITING, default_concurrency_limit=AT_ONCE)
    return blocks


def _endpoints(page: Page, picture: gr.Image, files: gr.File, controls: Controls[Any]) -> None:
    """What programs may call, by `gradio_client` or plain HTTP; the settings default to those of the default model."""
    with gr.Row(visible=False):
        result = gr.JSON()
        step = gr.Number(-1, label="step")
        for name, call, inputs, text in (
            ("predict", page.api_predict, [picture], "The answer for a picture and how deep it went."),
            ("attention", page.api_attention, [picture, step], "CLS maps of a picture at a step (-1: where it exits)."),
            ("batch", page.api_batch, [files], "Answers for many pictures."),
        ):
            gr.Button().click(
                call,
                [*inputs, *controls.settings],
                result,
                api_name=name,
                api_description=text,
                concurrency_limit=AT_ONCE,
            )


class _Closed:
    """Headers that hold the page to its own files, whatever the toolkit under it would like to fetch."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    (b"content-security-policy", POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                ]
            await send(message)

        await self.app(scope, receive, closed if scope["type"] == "http" else send)


def theme() -> gr.themes.Base:
    """Fonts of the system: none is fetched."""
    return gr.themes.Base(
        primary_hue="orange",
        neutral_hue="zinc",
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    )


def launch(
    models: Models, host: str = "127.0.0.1", port: int = 7860, share: bool = False, block: bool = True
) -> tuple[gr.Blocks, str]:
    """Serve the page; gives its address when it does not block."""
    folder = Path(tempfile.mkdtemp(prefix="odevit-demo-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["GRADIO_TEMP_DIR"] = str(folder)
    blocks = build(models)
    _, address, _ = blocks.launch(
        server_name=host,
        server_port=port,
        share=share,
        prevent_thread_lock=not block,
        quiet=not block,
        show_error=True,
        max_file_size=MAX_FILE,
        max_threads=2 * AT_ONCE,
        state_session_capacity=WAITING,
        allowed_paths=[],
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        footer_links=["api"],
        theme=theme(),
        # Not as css: that is rewritten selector by selector, which breaks media queries.
        head=f"<style>{(HERE / 'style.css').read_text(encoding='utf-8')}</style><script>{NAMES}</script>",
        app_kwargs={"middleware": [Middleware(_Closed)], "docs_url": None, "redoc_url": None},
    )
    return blocks, address
