"""What a format says of itself holds: its options are the command's, its names and extras are real."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from string import Formatter

import pytest
from typer.main import get_command

from odevit_serve.cli import EXTRAS, app
from odevit_serve.errors import UsageError
from odevit_serve.export import formats
from odevit_serve.export.formats.format import COMMON, Format
from odevit_serve.export.job import ExportJob, Settings

TABLE = Path(__file__).parents[3] / "docs" / "export.md"
ENTRIES = list(formats.FORMATS.values())
OPTIONS = {field.name.replace("_", "-") for field in dataclasses.fields(Settings)} - {"format"}


def test_every_option_in_the_list_is_one_of_the_command() -> None:
    known = {option for parameter in get_command(app).commands["export"].params for option in parameter.opts}  # type: ignore[attr-defined]
    assert {f"--{option}" for entry in ENTRIES for option in (*entry.options, *COMMON)} <= known


def test_every_option_of_an_export_is_for_some_format() -> None:
    taken = {option for entry in ENTRIES for option in entry.options} | set(COMMON)
    assert taken - {"json"} == OPTIONS  # the report as JSON is the command's own


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_names_itself_its_extras_and_what_it_makes(entry: Format) -> None:
    assert formats.find(entry.name) is entry
    assert set(entry.extras) <= set(EXTRAS)
    assert {name for _, name, _, _ in Formatter().parse(entry.makes) if name} <= {"name", "steps", "source"}
    assert len(set(entry.options)) == len(entry.options)
    assert not set(entry.options) & set(COMMON)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_what_is_written_without_an_output_is_what_the_list_says(entry: Format, tiny_bundle: Path) -> None:
    job = ExportJob(str(tiny_bundle), Settings(entry.name), lambda text: None)
    if entry.in_bundle:
        assert job.target == tiny_bundle
        assert all(name in entry.makes for name in entry.in_bundle)
    else:
        said = entry.makes.format(name="random", steps=8, source="unrolled").split()[0].rstrip("/:,")
        assert str(job.target) == said
        assert job.target.suffix == entry.suffix(job)  # so that it could be asked for by --output as well


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_option_of_another_format_is_refused_with_those_that_take_it(entry: Format) -> None:
    formats.check_options(entry, [*entry.options, *COMMON])
    for option in OPTIONS - {*entry.options, *COMMON}:
        takers = ", ".join(other.name for other in ENTRIES if option in other.options)
        with pytest.raises(UsageError, match=f"--{option} does not apply to the format {entry.name}: .*{takers}$"):
            formats.check_options(entry, [option])


def test_the_documented_table_is_the_one_of_the_list() -> None:
    text = TABLE.read_text(encoding="utf-8")
    begin, end = "<!-- export table: begin -->\n", "<!-- export table: end -->"
    assert text.partition(begin)[2].partition(end)[0] == formats.markdown()
