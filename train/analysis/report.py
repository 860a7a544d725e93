"""One HTML file that needs nothing beside it: what was measured, drawn, and said in sentences."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...config import Preprocessing
from ...files import atomic
from .figures import DRAWN

Numbers = dict[str, Any]
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #23232a; max-width: 1000px; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: .2rem } h2 { margin-top: 3rem; border-top: 1px solid #ddd; padding-top: 1.2rem }
img { max-width: 100%; height: auto; display: block; margin: 1rem 0 }
table { border-collapse: collapse; margin: 1rem 0; font-size: .9rem } th { text-align: left; font-weight: 600 }
th, td { padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #e6e6ea }
td:not(:first-child) { font-variant-numeric: tabular-nums }
.said { background: #eef4fb; border-left: 4px solid #1f66b0; padding: .6rem 1rem }
.out, .how, figcaption { color: #5a5a66 }
nav a { margin-right: 1rem } code { background: #f2f2f5; padding: .1rem .3rem }
"""


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}%"


def estimate(value: Numbers | None, digits: int = 2) -> str:
    if not value or value["value"] is None:
        return "not defined"
    return f"{value['value']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = "".join(f"<th>{html.escape(str(h))}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _depth(n: Numbers) -> tuple[list[str], str]:
    measure, best, own = n["measure"], n["recommended_steps"], n["own"]["steps"]
    here, there = percent(n["at_recommended"][measure]), percent(n["at_own"][measure])
    if best < own:
        said = [
            f"{measure.capitalize()} is flat from {best} steps on: {here} there, {there} at the model's own {own} "
            f"(within half a point). Recommended: export with <code>--steps {best}</code>."
        ]
    else:
        said = [f"No smaller number of steps stays within half a point of the {there} at the model's own {own}."]
    others = [(c["solver"], c["splitting"], {r["steps"]: r for r in c["rows"]}[own][measure]) for c in n["curves"]]
    rows = [(f"{solver}, {splitting}", percent(value)) for solver, splitting, value in others]
    return said, table(("scheme", f"{measure} at {own} steps"), rows)


def _stability(n: Numbers) -> tuple[list[str], str]:
    said, rows = [], []
    for name, kind in n["kinds"].items():
        time = "none" if kind["median_time"] is None else f"{kind['median_time']:.2f}"
        once = next(row for row in kind["stopping"] if row["times"] == 1.0)
        cost = f"{once['mean_steps']:.1f}, {percent(once['differs'])} differ"
        if "accuracy" in once:
            cost += f", accuracy {percent(once['accuracy'])}"
        rows.append((
            name, f"{kind['mean']:.3f} ± {kind['deviation']:.3f}", percent(kind["positive"], 0), time,
            estimate(kind.get("auroc_of_error")), estimate(kind.get("correlation_with_right")), cost,
        ))  # fmt: skip
    head = ("exponent", "mean ± sd", "positive", "median Lyapunov time", "AUROC of error", "r with being right",
            "mean steps if stopped there")  # fmt: skip
    if "auroc_of_doubt" in n:
        doubt = n["auroc_of_doubt"]
        rows.append(("1 - confidence", "", "", "", estimate(doubt), "", ""))
        best = max((kind["auroc_of_error"]["value"] or 0.0, name) for name, kind in n["kinds"].items())
        if doubt["value"] is not None:
            said.append(
                f"As a predictor of error the {best[1]} exponent has AUROC {best[0]:.2f}; 1 - confidence has "
                f"{doubt['value']:.2f}."
            )
        r = n["kinds"]["maximal"]["class_correlation"]
        if r and r["value"] is not None:
            sure = "its interval contains 0: no correlation is shown" if r["low"] <= 0 <= r["high"] else (
                "classes with larger exponents are " + ("more" if r["value"] > 0 else "less") + " often right"
            )  # fmt: skip
            said.append(f"Over classes, maximal exponent and accuracy correlate by {estimate(r)}; {sure}.")
        once = next(row for row in n["kinds"]["maximal"]["stopping"] if row["times"] == 1.0)
        said.append(
            f"Stopping every image at its Lyapunov time (maximal) would leave {percent(once['accuracy'])} of "
            f"{percent(n['full']['accuracy'])} accuracy at {once['mean_steps']:.1f} of {n['full']['steps']} steps."
        )
    first, last = n["boundary"]["steps"][0], n["boundary"]["steps"][-1]
    said.append(
        f"Toward the nearest boundary the exponent is positive for {percent(first['positive'], 0)} of images after the "
        f"first step and {percent(last['positive'], 0)} after the last; the median image has passed "
        f"{last['times'][1]:.2f} Lyapunov times by then."
    )
    return said, table(head, rows) + table(
        ("after step", "exponent toward the boundary (10%, median, 90%)", "positive", "Lyapunov times passed (median)",
         "AUROC of a later change"),
        [
            (str(row["step"]), ", ".join(f"{value:.2f}" for value in row["exponent"]), percent(row["positive"], 0),
             f"{row['times'][1]:.2f}", estimate(row["auroc_of_change"]))
            for row in n["boundary"]["steps"]
        ],
    )  # fmt: skip


def _distance(n: Numbers) -> tuple[list[str], str]:
    said = [f"Student and teacher agree on {percent(n['agreement'])} of images."]
    if n["region"] is None:
        said.append("There is no distance within which 95% of the images agree: no agreement region was found.")
    else:
        said.append(
            f"Within a distance of {n['region']:.1f} of the teacher's CLS, 95% agree; {percent(n['within_region'])} of "
            "images end there."
        )
    said.append(f"Distance predicts disagreement with AUROC {estimate(n['auroc_of_disagreement'])}.")
    rows = [(g["name"], g["images"], "" if g["mean"] is None else f"{g['mean']:.2f}") for g in n["groups"]]
    return said, table(("", "images", "mean distance"), rows)


def _steepness(n: Numbers) -> tuple[list[str], str]:
    error, printed = n["error"], n["printed"]
    said = [
        f"The model's steps end {error['median']:.3g} (median; CLS {error['median_of_cls']:.3g}) from the path of 10 "
        "times the steps."
    ]
    holds = "above" if printed["holds"] else "not above"
    times = printed["bound"] / error["median"] if error["median"] else float("inf")
    said.append(
        f"Eq. 11 as printed (radius {n['radius']['assumed']:g}, L = {printed['lipschitz']:g}) gives "
        f"{printed['bound']:.3g}, {times:.2g} times the error: it is {holds} the error of every image. Its "
        f"tokens reach a length of {n['radius']['largest_token']:.1f}."
    )
    if "theorem" in n:
        t = n["theorem"]
        known = "above the error of every image" if t["holds"] else "not above the error of every image"
        said.append(
            f"Eq. 8 with constants measured along each path is {known}, by a factor of "
            f"10<sup>{t['median_log10_excess']:.0f}</sup> (median)."
        )
    else:
        said.append("Eq. 8 is about Euler's method; this model is integrated by another, so it is left out.")
    rows = [
        (k, f"{v['alone']:.2f}", f"{v['with norm']:.2f}" if "with norm" in v else "") for k, v in n["norms"].items()
    ]
    return said, table(("projection", "spectral norm", "with the CenterNorm before it"), rows)


def _exits(n: Numbers) -> tuple[list[str], str]:
    levels = list(next(iter(n["rules"].values()))["at_levels"])
    rows = [
        (
            name,
            *(f"{rule['at_levels'][k]['mean_steps']:.2f} ({percent(rule['at_levels'][k]['differs'])})" for k in levels),
        )
        for name, rule in n["rules"].items()
    ]
    best = min((rule["at_levels"]["1%"]["mean_steps"], name) for name, rule in n["rules"].items())
    held = n["rules"][best[1]]["at_levels"]["1%"]["differs"]
    said = [
        f"With thresholds set for 1% disagreement on one half of the images, the rule {best[1]} needs the fewest "
        f"steps on the other: {best[0]:.2f} of {n['steps']}, where {percent(held)} differ."
    ]
    return said, table(("rule", *(f"mean steps at {k} (differs)" for k in levels)), rows)


def _attention(n: Numbers) -> tuple[list[str], str]:
    first, last = n["entropy"][0], n["entropy"][-1]
    moves = "sharpens" if last < first - 0.005 else "spreads" if last > first + 0.005 else "stays as broad"
    return [
        f"Attention {moves} along the trajectory: entropy goes from {first:.3f} to {last:.3f} of the largest possible."
    ], ""


def _energy(n: Numbers) -> tuple[list[str], str]:
    rows = [
        (
            f"head {number}",
            percent(head["falls"]),
            percent(head["falls_with_held_keys"]),
            percent(head["falls_over_all"]),
        )
        for number, head in enumerate(n["heads"], 1)
    ]
    falling = sum(head["falls_with_held_keys"] > 0.5 for head in n["heads"])
    said = [
        "With the keys that a step starts from, the energy of CLS falls in most steps in "
        f"{falling} of {len(n['heads'])} heads."
    ]
    areas = {
        name: [row["value"] for row in steps if row["value"] is not None]
        for name, steps in n["auroc_of_change"].items()
    }
    for name, values in areas.items():
        if values:
            said.append(
                f"As a predictor that the answer will still change, the {name} has AUROC {min(values):.2f} to "
                f"{max(values):.2f} over the steps."
            )
    if "auroc_of_error" in n:
        said.append(f"The last energy predicts error with AUROC {estimate(n['auroc_of_error'])}.")
    return said, table(("", "steps that lower it", "with held keys", "images that end lower"), rows)


def _tokens(n: Numbers) -> tuple[list[str], str]:
    rows = [
        (f"{threshold:g}", *(percent(v, 0) for v in resting), percent(saved))
        for threshold, resting, saved in zip(n["thresholds"], n["resting"], n["saved"])
    ]
    steps = range(1, len(n["resting"][0]) + 1)
    shares = ", ".join(f"{percent(saved)} at {at:g}" for at, saved in zip(n["thresholds"], n["saved"]))
    said = [
        "Leaving out tokens once they are slower than a part of the first mean speed for good would save at most so "
        f"much of the work on tokens, if it were known in advance and changed nothing: {shares}."
    ]
    return said, table(("speed below", *(f"step {step}" for step in steps), "could save"), rows)


SECTIONS: dict[str, tuple[str, str, Callable[[Numbers], tuple[list[str], str]]]] = {
    "depth": (
        "Steps and horizon",
        "The same weights integrated in fewer or more steps, and over a shorter or longer time than in training (the "
        "red box). In flat regions steps and horizon can be changed; a sharp drop suggests that the model has learned "
        "its step size, too. In the second figure the dotted line is the model's own number of steps, the dashed one "
        "the recommended.",
        _depth,
    ),
    "stability": (
        "Lyapunov exponents",
        "How fast nearby states move apart along an image's trajectory. The maximal exponent carries a random "
        "direction along by the derivative of the integrator, over this horizon only; the free one is the growth of "
        "the velocity. Positive: they part. The last figure has the exponent toward the nearest decision boundary, by "
        "which integration ends early, and the Lyapunov times it adds up to. Numbers in brackets are 95% confidence "
        "intervals; AUROC 0.5 is chance.",
        _stability,
    ),
    "distance": (
        "Distance to the teacher",
        "Where the student's CLS ends, measured from the teacher's normalised last CLS, by who classifies the image "
        "rightly. The dashed line is the agreement region as measured: of the images within it, 95% get the "
        "teacher's answer.",
        _distance,
    ),
    "steepness": (
        "Steepness, and the error bound",
        "Left: the largest singular value of psi's Jacobian at the states of the trajectory, a lower estimate of its "
        "Lipschitz constant. Right: how far the model's steps are from the solution, taken as the same trajectory at "
        "10 times the steps, and the bounds of eq. 8 and 11.",
        _steepness,
    ),
    "exits": (
        "Exit rules",
        "Each curve is one rule at all its thresholds: what it changes against what it spends. Lower (and for accuracy "
        "higher) and further left is better. Below: how well a rule's score tells, at each step, that the answer will "
        "still change. In the table the threshold comes from one half of the images and is applied to the other.",
        _exits,
    ),
    "attention": (
        "Attention",
        "What CLS looks at: entropy of its attention over all tokens (1: everywhere alike), and maps on the patches, "
        "mean over heads, each scaled for itself. A wrong answer is written in red.",
        _attention,
    ),
    "energy": (
        "Hopfield energy",
        "Each head as a Hopfield network: a query is a state, the keys are the stored patterns, and the energy is half "
        "the squared query less the log-sum-exp of its products with the keys. Where values are keys, attention lowers "
        "it while the keys stay; this model's values and its MLP are free to raise it. Right: 0.5 is chance.",
        _energy,
    ),
    "tokens": (
        "Depth per token",
        "The part of the tokens whose speed stays below a threshold from a step on to the end; speeds are parts of the "
        "mean speed of the image's tokens in the first step. A router that gives each token its own depth could leave "
        "those out; their keys and values would still be read by the others.",
        _tokens,
    ),
}


def pictures(pixels: np.ndarray, spec: Preprocessing) -> list[np.ndarray]:
    """Normalised pixels [n,3,H,W] as pictures again."""
    mean, std = (np.array(v).reshape(1, -1, 1, 1) for v in (spec.mean, spec.std))
    return list((255 * (pixels * std + mean)).clip(0, 255).round().astype(np.uint8).transpose(0, 2, 3, 1))


def write(folder: Path, numbers: Numbers, shown: list[np.ndarray]) -> Path:
    """report.html, the figures as PNG files and numbers.json."""
    parts = numbers["sections"]
    images: dict[str, bytes] = {}
    for name, (section, draw) in DRAWN.items():
        if "left_out" in parts[section]:
            continue
        figure = draw(parts[section], shown) if name == "attention-maps" else draw(parts[section])
        if figure is not None:
            buffer = io.BytesIO()
            figure.savefig(buffer, dpi=130, format="png")
            images[name] = buffer.getvalue()
    for name, content in images.items():
        with atomic(folder / f"{name}.png") as path:
            path.write_bytes(content)
    for name in set(DRAWN) - set(images):  # of an earlier run that had them
        (folder / f"{name}.png").unlink(missing_ok=True)
    with atomic(folder / "numbers.json") as path:
        path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    with atomic(folder / "report.html") as path:
        path.write_text(page(numbers, images), encoding="utf-8")
    return folder / "report.html"


def page(numbers: Numbers, images: dict[str, bytes]) -> str:
    model = numbers["model"]
    own, name = model["integration"], html.escape(model["name"])
    facts = f"{numbers['images']:,} images"
    if numbers["accuracy"] is not None:
        facts += f", accuracy {percent(numbers['accuracy'])}"
    if numbers["quick"]:
        facts += "; a quick look: intervals are wide"
    body = [
        f"<h1>{name}: what it does</h1>",
        f"<p>{own['steps']} steps of {own['solver']} ({own['splitting']}) over a horizon of {own['horizon']:g}. "
        f"{facts}. odevit-serve {numbers['version']}.</p>",
        "<nav>" + "".join(f'<a href="#{key}">{title}</a>' for key, (title, _, _) in SECTIONS.items()) + "</nav>",
    ]
    for key, (title, how, tell) in SECTIONS.items():
        part = numbers["sections"][key]
        body.append(f'<h2 id="{key}">{title}</h2>')
        if "left_out" in part:
            body.append(f'<p class="out">Left out. {html.escape(part["left_out"])}</p>')
            continue
        said, after = tell(part)
        body.append(f'<p class="how">{how}</p><p class="said">{" ".join(said)}</p>')
        for file, (section, _) in DRAWN.items():
            if section == key and file in images:
                source = base64.b64encode(images[file]).decode()
                body.append(f'<figure><img alt="{file}" src="data:image/png;base64,{source}"></figure>')
        body.append(after + f'<p class="out">From {part["images"]:,} images.</p>')
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{name}: analysis</title><style>{STYLE}</style><body>{''.join(body)}</body></html>\n"
    )
