"""The command itself: quick help, missing extras, exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from odevit_serve import cli
from odevit_serve.errors import MissingExtra

HEAVY = ("torch", "onnxruntime", "numpy", "PIL", "fastapi", "gradio", "transformers", "onnx")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['odevit-serve', '--help']\n"
        "from odevit_serve.cli import main\n"
        "try: main()\n"
        f"except SystemExit: print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = python(code)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "predict" in done.stdout


def test_every_command_has_help() -> None:
    for command in cli.app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        done = CliRunner().invoke(cli.app, [name, "--help"])
        assert done.exit_code == 0, name
        assert command.callback.__doc__, name


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("train", "['train', 'somewhere']"),
        ("train", "['val', '--data', 'somewhere']"),
        ("export", "['export', '--format', 'parts', '--overwrite']"),
        ("demo", "['demo']"),
        ("train", "['analyze', '--data', 'somewhere']"),
        ("hub", "['push', 'cifar10', 'someone/model']"),
        ("train", "['push', 'cifar10', 'someone/model', '--remote-code']"),
    ],
)
def test_a_missing_extra_is_named_and_nothing_more(extra: str, words: str) -> None:
    """The modules of the extra are hidden from the import system, as on a lean install."""
    code = (
        "import importlib.util, sys\n"
        "from odevit_serve import cli\n"
        "real = importlib.util.find_spec\n"
        f"hidden = cli.EXTRAS[{extra!r}]\n"
        "importlib.util.find_spec = lambda name, *a: None if name in hidden else real(name, *a)\n"
        f"sys.argv = ['odevit-serve', *{words}]\n"
        "cli.main()"
    )
    done = python(code)
    assert done.returncode == 1
    assert f"pip install 'odevit-serve[{extra}]', or from a checkout pip install '.[{extra}]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_every_extra_that_commands_ask_for_exists() -> None:
    from importlib.metadata import metadata

    offered = set(metadata("odevit-serve").get_all("Provides-Extra") or ())
    assert set(cli.EXTRAS) <= offered
    assert {"train", "export", "demo", "ray", "tensorrt", "tensorrt-rtx", "test", "all"} <= offered
    cli.EXTRAS["nothing"] = ("no_such_module",)
    try:
        with pytest.raises(MissingExtra, match="odevit-serve"):
            cli.require("nothing")
    finally:
        del cli.EXTRAS["nothing"]


def test_mistyped_commands_get_a_proposal_and_code_2() -> None:
    done = CliRunner().invoke(cli.app, ["predct"])
    assert done.exit_code == 2
    assert "Did you mean 'predict'" in done.output


INTERRUPTED = """
import runpy, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "odevit_serve.cli.info":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
runpy.run_module("odevit_serve", run_name="__main__")
"""


def test_an_interruption_while_commands_are_imported_is_one_word() -> None:
    done = python(INTERRUPTED)
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")


def test_tracebacks_only_with_debug() -> None:
    call = (
        "import sys; sys.argv = ['odevit-serve', 'info', 'no-such-model'{}]; from odevit_serve.cli import main; main()"
    )
    plain, debug = python(call.format("")), python(call.format(", '--debug'"))
    assert plain.returncode == debug.returncode == 1
    assert plain.stderr.startswith("no model 'no-such-model'")
    assert len(plain.stderr.splitlines()) == 1
    assert "Traceback" in debug.stderr
