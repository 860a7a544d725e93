"""The page: one picture, two settings side by side, many pictures. Everything on it is answered by the engine."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

# Read when gradio is imported: no word to anyone about who runs it, and no update check.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import bundle, exits
from ..dynamics import Floats
from ..engine import Answer, Engine
from ..errors import UsageError, UserError
from ..model import BundleModel, load
from . import cards, plots, trajectory
from .trajectory import Choice, Run

HERE = Path(__file__).parent
EXAMPLES = HERE / "examples"
MAX_FILE = "16mb"
MAX_BATCH = 200  # pictures at once in the third tab
AT_ONCE = 8  # visitors whose pictures are worked on; a picture holds a thread of the page, not one of the engine
WAITING = 64  # visitors in line before the page says that it is busy
KEEP = 3600  # seconds that a visitor's picture and numbers are kept
EMPTY = '<div class="empty">Drop a picture, take one with the camera, or choose an example.</div>'
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
T = TypeVar("T")


class Models:
    """The models on offer by name; each gets its engine when it is first asked for."""

    def __init__(self, given: list[str], device: str = "cpu", threads: int | None = None):
        names = {name: name for name in bundle.bundled()}
        for source in given:
            path = bundle.find(source)
            if path.is_file():
                raise UserError(f"{path} is one graph and shows no steps: give the bundle that it was exported from")
            names[source if source in names else path.name] = source
        if not names:
            raise UsageError("there is no model to show: give one with --model")
        first = given[0] if given else (bundle.DEFAULT if bundle.DEFAULT in names else next(iter(names)))
        self.default = next(name for name, source in names.items() if source == first)
        self._sources, self._device, self._threads = names, device, threads
        self._engines: dict[str, Engine] = {}
        self._heads: dict[str, tuple[Floats, Floats] | None] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return list(self._sources)

    def engine(self, name: str) -> Engine:
        with self._lock:
            if name not in self._sources:
                raise UsageError(f"no model {name!r} on this page: choose one of {', '.join(self._sources)}")
            if name not in self._engines:
                model = load(self._sources[name], self._device, self._threads)
                assert isinstance(model, BundleModel)
                self._heads[name] = trajectory.head(model.path)
                self._engines[name] = Engine(model, slots=16, queue=2 * MAX_BATCH).start()
            return self._engines[name]

    def config(self, name: str) -> bundle.Config:
        return self.engine(name).model.config

    def head(self, name: str) -> tuple[Floats, Floats] | None:
        self.engine(name)
        return self._heads[name]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close(grace=2.0)


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
    image.preprocess = lambda payload: None if payload is None else payload.path  # type: ignore[method-assign]
    return image


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    step: float
    usual: float


def threshold_range(config: bundle.Config, rule: str, steps: int) -> Range:
    """Where the threshold of a rule makes sense; the bundle's own value stands as it is."""
    policy = config.exit
    reach = max(policy.travel, default=4.0)
    found = {
        "margin": Range(0, 2 * reach, reach / 200, reach / 4),
        "confidence": Range(0, 1, 0.01, 0.9),
        "patience": Range(1, max(2, steps), 1, min(3, steps)),
        "kl": Range(-0.2, 0, 0.0005, -0.001),
        "latent-diff": Range(-50, 0, 0.05, -1),
    }.get(rule, Range(0, 2, 0.005, 1))
    if rule == policy.rule and exits.calibrated(config):
        own = policy.threshold
        high = max(found.high, 2 * own) if rule not in ("confidence", "kl", "latent-diff") else found.high
        return Range(min(found.low, own), high, found.step, own)
    return found


def rules(config: bundle.Config) -> list[str]:
    return [name for name, rule in exits.RULES.items() if bool(config.exit.travel) or not rule.needs_travel]


@dataclass(frozen=True)
class Controls(Generic[T]):
    """What makes a `Choice`, in order: the inputs themselves, or their values."""

    model: T
    adaptive: T
    rule: T
    threshold: T
    max_steps: T
    solver: T
    steps: T

    @property
    def settings(self) -> list[T]:
        return list(vars(self).values())


class Page:
    """The handlers. Each gives a message in the place of its answer when something is wrong."""

    def __init__(self, models: Models):
        self.models = models

    def choice(
        self, model: str, adaptive: bool, rule: str, threshold: float, max_steps: float, solver: str, steps: float
    ) -> Choice:
        config = self.models.config(model)
        own, policy = config.integration, config.exit
        count = own.steps if not steps else int(steps)
        known = rule if rule in rules(config) else None
        # A slider moves in steps, the calibrated threshold lies between them: what looks the same is the same.
        grain = threshold_range(config, known or policy.rule, count).step
        if known == policy.rule and abs(threshold - policy.threshold) < grain / 2:
            threshold = policy.threshold
        return Choice(
            known if adaptive else None,
            float(threshold) if adaptive and known not in (None, "fixed") else None,
            None if not max_steps or max_steps >= count else int(max_steps),
            solver if solver in trajectory.solvers(config) else None,
            None if count == own.steps else count,
            adaptive,
        )

    def run(self, picture: str | None, model: str, *settings: Any) -> Run:
        if picture is None:
            raise UsageError("there is no picture yet")
        name = Path(picture).name
        return trajectory.run(self.models.engine(model), model, picture, self.choice(model, *settings), name)

    def analyze(self, picture: str | None, head: str, opacity: float, *settings: Any) -> list[Any]:
        """Everything about one picture."""
        if picture is None:
            return [None, EMPTY, "", "", gr.skip(), gr.skip()]
        try:
            run = self.run(picture, *settings)
        except UserError as error:
            return [None, cards.message(str(error)), "", "", gr.skip(), gr.skip()]
        heads = ["mean", *(f"head {n + 1}" for n in range(run.way.maps.shape[1]))]
        head = head if head in heads else "mean"
        return [
            run,
            cards.answer(run),
            cards.attention(run, run.steps, head, opacity),
            plots.trajectory(run, self.models.head(run.name)),
            gr.update(maximum=run.way.steps, value=run.steps),
            gr.update(choices=heads, value=head),
        ]

    def map(self, run: Run | None, step: float, head: str, opacity: float) -> str:
        return "" if run is None else cards.attention(run, int(step), head, opacity)

    def compare(self, picture: str | None, *settings: Any) -> list[str]:
        """Two settings on one picture."""
        half = len(settings) // 2
        if picture is None:
            return [EMPTY, EMPTY]
        found = []
        for part in (settings[:half], settings[half:]):
            try:
                run = self.run(picture, *part)
                extra = plots.contraction(run) + plots.probabilities(run)
                found.append(f'{cards.answer(run)}<div class="plots">{extra}</div>')
            except UserError as error:
                found.append(cards.message(str(error)))
        return found

    def many(self, files: list[str] | None, model: str, *settings: Any) -> list[Any]:
        """Many pictures: a row each, and how deep they went."""
        if not files:
            return [[], "", "Choose some pictures."]
        try:
            rows = self._many(files, model, *settings)
        except UserError as error:
            return [[], "", f"**{error}**"]
        depths = [row["steps"] for row in rows if "steps" in row]
        full = next((row["full_steps"] for row in rows if "steps" in row), 1)
        table = [
            [row["picture"], row["label"], f"{row['probability']:.1%}", row["steps"], row["exit"]]
            if "steps" in row
            else [row["picture"], "", "", None, row["error"]]
            for row in rows
        ]
        words = f"{len(depths)} answered"
        if depths:
            words += f", {sum(depths) / len(depths):.2f} of {full} steps on average"
        wrong = len(rows) - len(depths)
        return [table, plots.histogram(depths, full), words + (f", {wrong} could not be read." if wrong else ".")]

    def _many(self, files: list[str], model: str, *settings: Any) -> list[dict[str, Any]]:
        if len(files) > MAX_BATCH:
            raise UsageError(f"{len(files)} pictures are more than the {MAX_BATCH} that this page takes at once")
        engine, choice = self.models.engine(model), self.choice(model, *settings)
        own = engine.model.config.integration.solver
        if choice.solver not in (None, own):
            raise UsageError(f"many pictures at once go by the bundle's own solver, {own}: choose it in the first tab")
        names = [Path(path).name for path in files]
        futures: list[Future[Answer]] = engine.submit_many(files, names=names, **choice.asked)
        rows: list[dict[str, Any]] = []
        for name, future in zip(names, futures):
            try:
                answer = future.result().prediction
            except UserError as error:
                rows.append({"picture": name, "error": str(error)})
                continue
            rows.append(
                {
                    "picture": name,
                    "label": answer.label,
                    "probability": answer.probability,
                    "steps": answer.steps,
                    "full_steps": answer.full_steps,
                    "exit": answer.exit.short,
                }
            )
        return rows

    # -- for programs ---------------------------------------------------------------------------------------------

    def api_predict(
        self,
        picture: str | None,
        model: str,
        adaptive: bool,
        rule: str,
        threshold: float,
        max_steps: float,
        solver: str,
        steps: float,
    ) -> dict[str, Any]:
        run = _shown(self.run)(picture, model, adaptive, rule, threshold, max_steps, solver, steps)
        return {
            "label": run.label,
            "top": [{"label": label, "probability": p} for label, p in run.top()],
            "steps": run.steps,
            "full_steps": run.depth.steps,
            "exit": run.reason.short,
            "sentence": cards.sentence(run),
            "guaranteed": run.depth.guaranteed,
            "full_label": run.full_label,
            "milliseconds": 1000 * run.seconds,
            "macs": run.macs(),
        }

    def api_attention(
        self,
        picture: str | None,
        step: float,
        model: str,
        adaptive: bool,
        rule: str,
        threshold: float,
        max_steps: float,
        solver: str,
        steps: float,
    ) -> dict[str, Any]:
        run = _shown(self.run)(picture, model, adaptive, rule, threshold, max_steps, solver, steps)
        at = run.steps if step < 0 else min(int(step), run.way.steps)
        return {"step": at, "heads": run.way.maps[at].tolist()}

    def api_batch(
        self,
        files: list[str] | None,
        model: str,
        adaptive: bool,
        rule: str,
        threshold: float,
        max_steps: float,
        solver: str,
        steps: float,
    ) -> list[dict[str, Any]]:
        return _shown(self._many)(files or [], model, adaptive, rule, threshold, max_steps, solver, steps)

    # -- controls -------------------------------------------------------------------------------------------------

    def defaults(self, model: str) -> Controls[dict[str, Any]]:
        """The controls as they are for a model that was just chosen."""
        config = self.models.config(model)
        steps, known = config.integration.steps, rules(config)
        calibrated = exits.calibrated(config)
        rule = config.exit.rule if calibrated and config.exit.rule in known else "confidence"
        return Controls(
            {"choices": self.models.names, "value": model},
            {"value": calibrated},
            {"choices": known, "value": rule},
            _threshold(rule, threshold_range(config, rule, steps)),
            {"maximum": steps, "value": steps},
            {"choices": trajectory.solvers(config), "value": config.integration.solver},
            {"maximum": 3 * steps, "value": steps},
        )

    def for_model(self, model: str) -> list[Any]:
        return [gr.update(**values) for values in self.defaults(model).settings[1:]]

    def for_rule(self, model: str, rule: str, steps: float) -> Any:
        return gr.update(**_threshold(rule, threshold_range(self.models.config(model), rule, int(steps))))

    def for_steps(self, steps: float) -> Any:
        return gr.update(maximum=int(steps), value=int(steps))

    def words(self, model: str, *settings: Any) -> str:
        return cards.guarantee(self.models.config(model), self.choice(model, *settings))


def _threshold(rule: str, bounds: Range) -> dict[str, Any]:
    contracts = rule in exits.RULES and exits.RULES[rule].contracts
    return {
        "minimum": bounds.low,
        "maximum": bounds.high,
        "value": bounds.usual,
        "step": bounds.step,
        "label": "kappa" if contracts else "threshold",
        "visible": rule != "fixed",
    }


def _shown(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with what is wrong told to the program that called."""

    @functools.wraps(call)
    def wrapped(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except UserError as error:
            raise gr.Error(str(error), print_exception=False) from None

    return wrapped


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
            "a differential equation. After each step there is an answer; integration ends once what is left of the "
            "trajectory can no longer change it.</p></div>",
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
            files = gr.File(file_count="multiple", label="Pictures", elem_id="files", height=160)
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
