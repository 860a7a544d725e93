"""The pictures of the report, drawn from its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Numbers = dict[str, Any]
BLUE, ORANGE, GREEN, RED, GREY = "#1f66b0", "#de6e14", "#1e8c5a", "#c0392b", "#777777"
COLORS = (BLUE, ORANGE, GREEN, "#8e44ad", RED, "#16a0b0", "#b08d16", GREY)
GROUPS = {
    "both right": GREEN, "only the teacher": "#e0a800", "only the student": BLUE, "both wrong": RED,
    "agree": GREEN, "differ": RED,
}  # fmt: skip


def _figure(columns: int, height: float = 3.8, width: float = 5.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.18)
        one.set_axisbelow(True)
    return figure, list(axes)


def _legend(axes: Axes, **settings: Any) -> None:
    axes.legend(frameon=False, fontsize=8, **settings)


def grid(numbers: Numbers) -> Figure:
    """Fig. 7: accuracy and agreement over steps and horizon."""
    rows = numbers["grid"]
    kinds = [kind for kind in ("accuracy", "agreement") if kind in rows[0]]
    steps, horizons = sorted({r["steps"] for r in rows}), sorted({r["horizon"] for r in rows})
    figure, all_axes = _figure(len(kinds), 0.9 + 0.42 * len(horizons), 0.9 + 0.5 * max(7, len(steps)))
    for axes, kind in zip(all_axes, kinds):
        value = {(r["horizon"], r["steps"]): 100 * r[kind] for r in rows}
        table = np.array([[value[t, n] for n in steps] for t in horizons])
        low, high = float(table.min()), float(max(table.max(), table.min() + 1))
        axes.imshow(table, cmap="viridis", aspect="auto", origin="lower", vmin=low, vmax=high)
        axes.grid(False)
        axes.set_xticks(range(len(steps)), [str(n) for n in steps])
        axes.set_yticks(range(len(horizons)), [f"{t:g}" for t in horizons])
        for i, t in enumerate(horizons):
            for j, n in enumerate(steps):
                own = (n, t) == (numbers["own"]["steps"], numbers["own"]["horizon"])
                dark = table[i, j] < low + 0.6 * (high - low)
                axes.text(j, i, f"{table[i, j]:.0f}", ha="center", va="center", fontsize=8,
                          color="white" if dark else "black", weight="bold" if own else "normal")  # fmt: skip
                if own:
                    axes.add_patch(_box(j, i))
        title = "accuracy, %" if kind == "accuracy" else f"agreement with {numbers['agreement_with']}, %"
        axes.set_title(title, fontsize=10)
        axes.set(xlabel="steps", ylabel="horizon")
    return figure


def _box(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, edgecolor="red", linewidth=1.8)


def curves(numbers: Numbers) -> Figure:
    """Fig. 8: the same horizon cut into fewer and more steps, for each scheme."""
    kinds = [kind for kind in ("accuracy", "agreement") if kind in numbers["curves"][0]["rows"][0]]
    figure, all_axes = _figure(len(kinds))
    for axes, kind in zip(all_axes, kinds):
        for curve, color in zip(numbers["curves"], COLORS):
            rows = curve["rows"]
            mine = curve is numbers["curves"][0]
            axes.plot([r["steps"] for r in rows], [100 * r[kind] for r in rows], color=color, marker="o", markersize=4,
                      linewidth=2.4 if mine else 1.2, zorder=3 if mine else 2,
                      label=f"{curve['solver']}, {curve['splitting']}{' (own)' if mine else ''}")  # fmt: skip
        axes.axvline(numbers["own"]["steps"], color=GREY, linestyle=":", linewidth=1)
        if numbers["recommended_steps"] != numbers["own"]["steps"]:
            axes.axvline(numbers["recommended_steps"], color=RED, linestyle="--", linewidth=1)
        ylabel = "accuracy, %" if kind == "accuracy" else f"agreement with\n{numbers['agreement_with']}, %"
        axes.set(xlabel=f"steps over the horizon of {numbers['own']['horizon']:g}", ylabel=ylabel)
    _legend(all_axes[0], loc="lower right")
    return figure


def classes(numbers: Numbers) -> Figure | None:
    """Fig. 5: mean exponent of each class against its accuracy."""
    kinds = {name: kind for name, kind in numbers["kinds"].items() if kind.get("classes")}
    if not kinds:
        return None
    figure, all_axes = _figure(len(kinds), 4.2)
    for axes, (name, kind) in zip(all_axes, kinds.items()):
        accuracy = [100 * c["accuracy"] for c in kind["classes"]]
        exponents = [c["exponent"] for c in kind["classes"]]
        axes.scatter(accuracy, exponents, s=90, c=accuracy, cmap="RdYlGn", edgecolor="black", linewidth=0.5, zorder=3)
        if len(accuracy) <= 20:
            for c, x, y in zip(kind["classes"], accuracy, exponents):
                axes.annotate(c["label"], (x, y), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=8)
        axes.margins(0.12, 0.15)
        r = kind["class_correlation"]
        note = "" if r["value"] is None else f": r = {r['value']:.2f} [{r['low']:.2f}, {r['high']:.2f}]"
        axes.set_title(f"{name} exponent{note}", fontsize=10)
        axes.set(xlabel="accuracy of the class, %", ylabel="mean exponent, 1 / time")
    return figure


def spread(numbers: Numbers) -> Figure:
    """Exponents of single images, right and wrong ones apart."""
    figure, all_axes = _figure(2, 3.4)
    right = np.array(numbers["right"]) if "right" in numbers else None
    for axes, (name, kind) in zip(all_axes, numbers["kinds"].items()):
        values = np.array(kind["values"], float)
        bins: Any = np.linspace(values.min(), values.max(), 32) if np.ptp(values) > 0 else 10
        if right is None:
            axes.hist(values, bins, color=BLUE, alpha=0.8)
        else:
            for chosen, color, label in ((right, GREEN, "right"), (~right, RED, "wrong")):
                axes.hist(values[chosen], bins, color=color, alpha=0.55, density=True, label=label)
            _legend(axes)
        if values.min() < 0 < values.max():
            axes.axvline(0, color="black", linewidth=0.8)
        axes.set(xlabel=f"{name} exponent", ylabel="density" if right is not None else "images")
    return figure


def boundary(numbers: Numbers) -> Figure:
    """The exponent toward the nearest boundary and the Lyapunov times passed, after each step: median, 10% to 90%."""
    figure, all_axes = _figure(2, 3.4)
    rows = numbers["boundary"]["steps"]
    steps = [row["step"] for row in rows]
    labels = {"exponent": "exponent toward the boundary, 1 / time", "times": "Lyapunov times passed"}
    for axes, (name, label) in zip(all_axes, labels.items()):
        low, middle, high = zip(*(row[name] for row in rows))
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.2)
        axes.plot(steps, middle, color=BLUE, marker="o", markersize=4)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xticks(steps)
        axes.set(xlabel="step", ylabel=label)
    return figure


def distance(numbers: Numbers) -> Figure:
    """Fig. 4 and 10: how far the student ends from the teacher, by who is right."""
    figure, (left, middle) = _figure(2)
    groups = [g for g in numbers["groups"] if g["images"]]
    values = [np.array(g["distances"]) for g in groups]
    low, high = np.quantile(np.concatenate(values), [0, 0.995])
    bins: Any = np.linspace(low, high, 36)
    left.hist(values, bins, stacked=True, color=[GROUPS[g["name"]] for g in groups],
              label=[f"{g['name']} ({g['images']})" for g in groups])  # fmt: skip
    if numbers["region"] is not None:
        left.axvline(numbers["region"], color="black", linestyle="--", linewidth=1)
        left.text(numbers["region"], left.get_ylim()[1], " 95% agree\n within", fontsize=8, va="top")
    left.set(xlabel="distance of the last CLS to the teacher's", ylabel="images")
    _legend(left, loc="upper right", bbox_to_anchor=(1.0, 1.18), ncols=2)
    for g in groups:
        middle.plot(range(len(g["by_step"])), g["by_step"], color=GROUPS[g["name"]], marker="o", markersize=4,
                    label=g["name"])  # fmt: skip
    middle.set(xlabel="step", ylabel="mean distance to the teacher's last CLS", ylim=(0, None))
    _legend(middle)
    return figure


def steepness(numbers: Numbers) -> Figure:
    """Steepness along the way, and the bound beside the error."""
    theorem = numbers.get("theorem")
    figure, (left, right) = _figure(2)
    steps = range(len(numbers["lipschitz"]["by_step"]))
    left.plot(steps, numbers["lipschitz"]["by_step"], color=BLUE, marker="o", markersize=4, label="mean of images")
    left.plot(steps, numbers["lipschitz"]["highest_by_step"], color=ORANGE, marker="o", markersize=4, label="highest")
    left.axhline(numbers["printed"]["lipschitz"], color=GREY, linestyle="--", linewidth=1)
    place = (len(steps) - 1, numbers["printed"]["lipschitz"])
    left.text(*place, "assumed by the paper", fontsize=8, va="bottom", ha="right", color=GREY)
    left.set(xlabel="after step", ylabel="largest singular value of psi's Jacobian", ylim=(0, None))
    _legend(left)
    error = numbers["error"]["by_step"]
    right.semilogy(range(1, len(error) + 1), error, color=BLUE, marker="o", markersize=4, label="measured, mean")
    right.axhline(numbers["printed"]["bound"], color=ORANGE, linestyle="--", label="eq. 11 as printed")
    if theorem:
        bound = float(np.median(theorem["log10_bound"]))
        if bound < 12:
            right.axhline(10**bound, color=RED, linestyle="--", label="eq. 8 with measured constants, median")
        else:
            right.plot(
                [], [], color=RED, linestyle="--", label=f"eq. 8 with measured constants: 1e{bound:.0f}, off scale"
            )
    right.set(xlabel="after step", ylabel="distance to the path of 10 times the steps")
    _legend(right)
    return figure


def exits(numbers: Numbers) -> Figure:
    """Each rule's curve: what is lost over what is spent."""
    labelled = "accuracy" in numbers
    figure, all_axes = _figure(2 if labelled else 1, 4.4, 5.4)
    for name, rule, style in _rules(numbers):
        curve = sorted(rule["curve"], key=lambda row: row["mean_steps"])
        steps = [row["mean_steps"] for row in curve]
        all_axes[0].plot(steps, [100 * row["differs"] for row in curve], label=name, **style)
        if labelled:
            all_axes[1].plot(steps, [100 * row["accuracy"] for row in curve], **style)
    all_axes[0].set(xlabel=f"mean steps of {numbers['steps']}", ylabel="differs from full depth, %")
    _legend(all_axes[0])
    if labelled:
        all_axes[1].axhline(100 * numbers["accuracy"], color=GREY, linestyle=":", linewidth=1)
        all_axes[1].set(xlabel=f"mean steps of {numbers['steps']}", ylabel="accuracy, % (dotted: full depth)")
    return figure


def changes(numbers: Numbers) -> Figure:
    """How well each rule's score tells, at each step, that the answer is not final."""
    figure, (left, right) = _figure(2, 3.8, 5.4)
    for name, rule, style in _rules(numbers):
        areas = [float("nan") if v is None else v for v in rule["auroc_by_step"]]
        left.plot(range(1, len(areas) + 1), areas, marker="o", markersize=3, label=name, **style)
    left.axhline(0.5, color=GREY, linestyle=":", linewidth=1)
    left.set(xlabel="step", ylabel="AUROC: will the answer still change?", ylim=(0, 1.02))
    _legend(left, ncols=2, loc="lower left")
    still = numbers["still_to_change"]
    right.bar(range(1, len(still) + 1), [100 * v for v in still], color=BLUE)
    right.set(xlabel="step", ylabel="answers that will still change, %")
    return figure


def _rules(numbers: Numbers) -> list[tuple[str, Numbers, dict[str, Any]]]:
    return [
        (name, rule, {"color": color, "linewidth": 2.4 if name == "contraction" else 1.2})
        for (name, rule), color in zip(numbers["rules"].items(), COLORS)
    ]


def entropy(numbers: Numbers) -> Figure:
    figure, (axes,) = _figure(1, 3.2, 6.0)
    steps, mean, wide = range(len(numbers["entropy"])), np.array(numbers["entropy"]), np.array(numbers["spread"])
    axes.fill_between(steps, mean - wide, mean + wide, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(steps, mean, color=BLUE, marker="o", markersize=4, label="all (band: one standard deviation)")
    for key, color in (("right", GREEN), ("wrong", RED)):
        if key in numbers:
            axes.plot(steps, numbers[key], color=color, linewidth=1.2, label=key)
    axes.set(xlabel="step", ylabel="entropy / largest possible")
    _legend(axes)
    return figure


def energy(numbers: Numbers) -> Figure:
    """Energy of CLS by head, less where it started, and how well energies tell that the answer is not final."""
    figure, (left, right) = _figure(2, 3.8, 5.4)
    for number, head in enumerate(numbers["heads"]):
        values = np.array(head["by_step"])
        left.plot(range(len(values)), values - values[0], color=COLORS[number % len(COLORS)], marker="o", markersize=3,
                  label=f"head {number + 1}")  # fmt: skip
    left.axhline(0, color=GREY, linestyle=":", linewidth=1)
    left.set(xlabel="step", ylabel="mean energy of CLS, less that of the start")
    _legend(left, ncols=2)
    for (name, rows), color in zip(numbers["auroc_of_change"].items(), COLORS):
        areas = [float("nan") if row["value"] is None else row["value"] for row in rows]
        right.plot(range(1, len(areas) + 1), areas, color=color, marker="o", markersize=4, label=name)
    right.axhline(0.5, color=GREY, linestyle=":", linewidth=1)
    right.set(xlabel="step", ylabel="AUROC: will the answer still change?", ylim=(0, 1.02))
    right.set_xlim(0.5, max(1, len(numbers["heads"][0]["by_step"]) - 2) + 0.5)
    _legend(right)
    return figure


def tokens(numbers: Numbers) -> Figure:
    """Tokens that are slow, and those that stay so, by step."""
    figure, (axes,) = _figure(1, 3.4, 6.4)
    for i, (threshold, color) in enumerate(zip(numbers["thresholds"], COLORS)):
        steps = range(1, len(numbers["below"][i]) + 1)
        axes.plot(steps, [100 * v for v in numbers["below"][i]], color=color, linestyle=":", linewidth=1.2)
        axes.plot(steps, [100 * v for v in numbers["resting"][i]], color=color, marker="o", markersize=4,
                  label=f"below {threshold:g}, from here to the end")  # fmt: skip
    axes.set(xlabel="step", ylabel="tokens, % (dotted: in this step)", ylim=(0, 102))
    _legend(axes)
    return figure


def maps(numbers: Numbers, pictures: list[np.ndarray]) -> Figure:
    """One row a picture, one column a step."""
    shown, most = numbers["shown"], 9
    every = np.array(shown["maps"])  # [images, N+1, patches]
    grid = round(every.shape[-1] ** 0.5)
    steps = np.unique(np.linspace(0, every.shape[1] - 1, most).round().astype(int))
    figure = Figure(figsize=(1.15 * (1 + len(steps)), 1.35 * len(every)), layout="constrained")
    all_axes = figure.subplots(len(every), 1 + len(steps), squeeze=False)
    for i, row in enumerate(all_axes):
        row[0].imshow(pictures[i])
        right = shown["labels"] is None or shown["labels"][i] == shown["answers"][i]
        row[0].set_title(shown["answers"][i], fontsize=8, color="black" if right else RED)
        for axes, step in zip(row[1:], steps):
            axes.imshow(every[i, step].reshape(grid, grid), cmap="magma")
            axes.set_title(f"step {step}" if i == 0 else "", fontsize=8)
        for axes in row:
            axes.set_axis_off()
    return figure


DRAWN: dict[str, tuple[str, Callable[..., Figure | None]]] = {  # file name -> section and how to draw it
    "steps-and-horizon": ("depth", grid),
    "steps": ("depth", curves),
    "exponents-by-class": ("stability", classes),
    "exponents-by-image": ("stability", spread),
    "exponent-over-time": ("stability", boundary),
    "distance-to-teacher": ("distance", distance),
    "bound": ("steepness", steepness),
    "exit-rules": ("exits", exits),
    "exit-scores": ("exits", changes),
    "attention-entropy": ("attention", entropy),
    "attention-maps": ("attention", maps),
    "energy": ("energy", energy),
    "tokens": ("tokens", tokens),
}
