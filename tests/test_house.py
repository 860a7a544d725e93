"""Who may import whom: dependencies point to the core, and the core needs no torch."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "odevit_serve": ROOT / "odevit_serve",
    "odevit_serve.train": ROOT / "train",
    "odevit_serve.export": ROOT / "export",
    "odevit_serve.demo": ROOT / "demo",
}
HEAVY = {"torch", "torchvision", "timm", "transformers", "accelerate", "gradio", "ray", "tensorrt", "matplotlib"}
TORCH_IN_CORE = {"odevit_serve.benchmark.torch_rows"}  # reached lazily, for the rows that compare with torch
MAKERS = {"odevit_serve.export.ship"}  # from a run to a bundled model: it uses everything


FILES = {"odevit_serve.runtime.model", "odevit_serve.guarantee.of_file"}  # where a single file is opened as one


class Import(NamedTuple):
    importer: str
    module: str  # absolute
    names: tuple[str, ...]
    lazy: bool  # inside a function, or for type checking alone


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            if "embed" not in parts:  # the examples in demo/embed know nothing of this package
                found[name] = path
    return found


MODULES = modules()


def imports(name: str) -> Iterator[Import]:
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            checking = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            inside = lazy or checking or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(name, alias.name, (), inside)
            elif isinstance(child, ast.ImportFrom):
                base = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                yield Import(name, module, tuple(a.name for a in child.names), inside)
            else:
                yield from visit(child, inside)

    return visit(ast.parse(path.read_text(encoding="utf-8")), False)


def targets(found: Import) -> set[str]:
    """The modules of this project that an import reaches."""
    inner = {f"{found.module}.{name}" for name in found.names} & set(MODULES)
    return inner or ({found.module} & set(MODULES))


def folder(module: str) -> str:
    """train, export, demo or core."""
    part = module.split(".")[1] if module.count(".") else ""
    return part if part in ("train", "export", "demo") else "core"


ALL = [found for name in MODULES for found in imports(name)]


def test_the_tree_was_read() -> None:
    assert {"odevit_serve.runtime.model", "odevit_serve.train.loop", "odevit_serve.export.formats.parts"} <= set(
        MODULES
    )
    assert len(ALL) > 500
    reached = {module for found in ALL for module in targets(found)}
    assert "odevit_serve.solvers" in reached


def test_the_core_imports_nothing_heavy_when_it_is_imported() -> None:
    top = [f for f in ALL if folder(f.importer) == "core" and not f.lazy]
    heavy = {(f.importer, f.module) for f in top if f.module.split(".")[0] in HEAVY} - {
        (f.importer, f.module) for f in top if f.importer in TORCH_IN_CORE or f.importer == "odevit_serve.serving.ray"
    }
    assert not heavy
    outward = {
        (f.importer, m) for f in top if f.importer not in TORCH_IN_CORE for m in targets(f) if folder(m) != "core"
    }
    assert not outward


def test_torch_is_in_one_file_of_the_core() -> None:
    users = {f.importer for f in ALL if folder(f.importer) == "core" and f.module.split(".")[0] == "torch"}
    assert users <= TORCH_IN_CORE


def test_only_commands_reach_out_of_the_core() -> None:
    reaching = {f.importer for f in ALL if folder(f.importer) == "core" for m in targets(f) if folder(m) != "core"}
    others = {name for name in reaching if not name.startswith("odevit_serve.cli.")}
    assert others <= TORCH_IN_CORE


@pytest.mark.parametrize(
    ("importer", "allowed"),
    [("train", {"core", "train"}), ("demo", {"core", "demo"}), ("export", {"core", "export", "train"})],
)
def test_folders_import_the_core_and_not_each_other(importer: str, allowed: set[str]) -> None:
    found = {
        (f.importer, m)
        for f in ALL
        if folder(f.importer) == importer and f.importer not in MAKERS
        for m in targets(f)
        if folder(m) not in allowed
    }
    assert not found


def test_export_knows_of_training_the_model_alone() -> None:
    found = {m for f in ALL if folder(f.importer) == "export" and f.importer not in MAKERS for m in targets(f)}
    assert {m for m in found if folder(m) == "train"} <= {"odevit_serve.train.model"}


def test_only_the_command_line_imports_the_command_line() -> None:
    users = {f.importer for f in ALL for m in targets(f) if m.startswith("odevit_serve.cli")}
    assert {name for name in users if not name.startswith("odevit_serve.cli")} <= {"odevit_serve.__main__"}


def test_the_kind_of_a_model_is_asked_only_where_it_is_loaded() -> None:
    for name, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        assert "isinstance(model, BundleModel" not in text, name
        assert "FileModel" not in text or name in FILES, name


def test_private_names_stay_in_their_module() -> None:
    own = [f for f in ALL if targets(f)]
    assert not {(f.importer, f.module, n) for f in own for n in f.names if n.startswith("_") and not n.startswith("__")}


def test_no_cycles() -> None:
    reach = {name: {m for f in imports(name) if not f.lazy for m in targets(f)} - {name} for name in MODULES}
    reach["odevit_serve.cli"] = set()  # its last line imports the commands, which register themselves on it
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for other in sorted(reach[name]):
                walk(other, (*trail, name))
            done.add(name)

    for name in sorted(reach):
        walk(name, ())


@pytest.mark.parametrize("name", ["anyio._backends._asyncio", "schemathesis.openapi"])
def test_installed_packages_are_imported_as_they_are(name: str) -> None:
    """pytest rewrites the packages of plugins that it finds by itself. Their modules are imported in servers' threads,
    too, and on Python 3.11 two threads that build a syntax tree at once end in a SystemError."""
    assert isinstance(importlib.import_module(name).__loader__, SourceFileLoader)


def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert not {name: places for name, places in homes.items() if len(places) > 1}
