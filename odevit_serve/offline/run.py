"""Answer a folder of pictures into a file: here, or on Ray Data by a pool of actors."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import bundle
from ..data import images
from ..errors import UserError
from ..runtime.model import load
from ..runtime.options import RequestOptions
from .answers import AnswersFile, row_of

BATCH = 64  # pictures that an actor is handed at once, and loses when it dies


@dataclass(frozen=True)
class Work:
    """What every actor needs: plain data."""

    model: str
    options: RequestOptions
    top: int = 5
    device: str = "cpu"
    threads: int | None = None
    trust: bool = False

    def settings(self) -> dict[str, Any]:
        """What decides the answers: the model by its content, and the options."""
        path = Path(self.model)
        files = [path] if path.is_file() else [path / name for name in (bundle.CONFIG, bundle.STEM, bundle.STEP)]
        digests = {file.name: bundle.digest(file) for file in files if file.is_file()}
        return {"files": digests, "options": dataclasses.asdict(self.options), "top": self.top}


class Answerer:
    """A model with its slots; an actor of Ray Data, or the one of this process."""

    def __init__(self, work: Work):
        self.work = work
        self.model = load(work.model, work.device, work.threads, work.trust)

    def rows(self, sources: Iterable[str]) -> Iterator[dict[str, Any]]:
        """In the order of the sources, as they are answered."""
        for result in self.model.stream(sources, self.work.options):
            yield row_of(result, self.work.top)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """For Ray Data. Rows are text, so that blocks with and without a value have one schema."""
        return {"row": [json.dumps(row, ensure_ascii=False) for row in self.rows(map(str, batch["source"]))]}


def run(
    paths: list[str],
    output: Path,
    work: Work,
    on_ray: bool = False,
    actors: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> tuple[int, int, int]:
    """Answer what has no answer yet. Gives the numbers of answers made now, there before, and failed now."""
    with AnswersFile(output, work.settings()) as answers:
        before = len(answers.done)
        left = (path for path in images.walk(paths) if path not in answers.done)
        rows = _by_ray(list(left), work, actors) if on_ray else Answerer(work).rows(left)
        for row in rows:
            answers.write(row)
            advance()
        answers.finish()
        if not answers.done:
            raise UserError(f"no pictures in {', '.join(paths)} ({', '.join(sorted(images.SUFFIXES))})")
        return len(answers.done) - before, before, answers.failed


def _by_ray(sources: list[str], work: Work, actors: int | None) -> Iterator[dict[str, Any]]:
    """Rows in any order. Ray holds back reading while this process has not taken what is ready, and hands the batch of
    an actor that died to another."""
    if not sources:
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(
            address=os.environ.get("RAY_ADDRESS"),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False  # the rows that arrive here are counted
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        count = actors or max(1, int(ray.cluster_resources().get("CPU", 1)))
        work = dataclasses.replace(work, threads=work.threads or 1)
        items = [{"source": os.path.abspath(source)} for source in sources]
        named = {os.path.abspath(source): source for source in sources}
        blocks = max(1, (len(items) + BATCH - 1) // BATCH)
        answered = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
            Answerer,
            batch_size=BATCH,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=min(count, blocks)),
            fn_constructor_args=(work,),
        )
        for batch in answered.iter_batches(batch_size=None):
            for text in batch["row"]:
                row = json.loads(str(text))
                yield {**row, "source": named[row["source"]]}
    finally:
        if started:
            ray.shutdown()
