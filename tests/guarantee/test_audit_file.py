"""The recordings of audited images: what is written is read, by the model that it belongs to."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from odevit_serve.errors import UserError
from odevit_serve.guarantee import audit_file
from odevit_serve.guarantee.audit_file import Audited, AuditWriter, rotated

HEAD = {"odevit_audit": 1, "model": "a", "rule": "drift"}


def audited(number: int) -> Audited:
    return Audited(1, number, number, True, (0.5, math.inf), (number, number), (0.0, math.nan))


def write(path: Path, numbers: range, head: dict[str, object] = HEAD, records: int = 100) -> None:
    writer = AuditWriter(path, head, records)
    for number in numbers:
        writer.write(audited(number))
    writer.close()


def test_what_is_written_is_read_and_numbers_that_json_has_no_word_for_count_as_nothing_known(tmp_path: Path) -> None:
    write(tmp_path / "a", range(3))
    found = audit_file.read(tmp_path / "a", HEAD)
    assert found.answers.tolist() == [[0, 0], [1, 1], [2, 2]]
    np.testing.assert_array_equal(found.scores, [[0.5, -math.inf]] * 3)
    np.testing.assert_array_equal(found.lyapunov_times, [[0.0, math.inf]] * 3)
    assert audit_file.read(tmp_path / "a", HEAD, limit=2).answers[:, 0].tolist() == [1, 2]


def test_a_full_file_steps_aside_and_both_are_read_in_order(tmp_path: Path) -> None:
    write(tmp_path / "a", range(7), records=3)
    assert rotated(tmp_path / "a").exists()
    assert audit_file.read(tmp_path / "a", HEAD).answers[:, 0].tolist() == [3, 4, 5, 6]  # two files are kept


def test_images_of_another_rule_are_not_read_and_another_name_is_no_other_model(tmp_path: Path) -> None:
    write(tmp_path / "a", range(2), {**HEAD, "rule": "margin"})
    with pytest.raises(UserError, match="its 2 images were answered by another model, rule or setting"):
        audit_file.read(tmp_path / "a", HEAD)
    write(tmp_path / "a", range(5, 6), {**HEAD, "model": "b"})
    assert audit_file.read(tmp_path / "a", HEAD).answers[:, 0].tolist() == [5]


@pytest.mark.parametrize(
    ("content", "told"),
    [("no json\n", "is not an audit recording"), ('{"odd": 1}\n', "has no recordings for this bundle: its 1 images")],
)
def test_another_file_is_told(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "a").write_text(content)
    with pytest.raises(UserError, match=told):
        audit_file.read(tmp_path / "a", HEAD)


def test_a_file_whose_last_line_was_cut_off_goes_on_and_is_read(tmp_path: Path) -> None:
    """As a server leaves it that was killed while it wrote; the next one would have written into that line."""
    path, head = tmp_path / "audit.jsonl", {"odevit_audit": audit_file.FORMAT}
    record = audit_file.Audited(1, 2, 2, True, (0.5, 0.6), (2, 2), (0.0, 0.0))
    for number in range(3):
        writer = audit_file.AuditWriter(path, head)
        writer.write(record)
        writer.close()
        if number < 2:
            path.write_bytes(path.read_bytes()[:-9])
    assert len(audit_file.read(path, head).scores) == 1  # each of the others was cut off
    path.write_bytes(path.read_bytes() + b'{"steps"')
    assert len(audit_file.read(path, head).scores) == 1
