"""What a run says while it works, where no terminal shows a bar."""

from __future__ import annotations

import pytest

from odevit_serve.train import progress


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0:00 min"), (59.9, "0:59 min"), (3599, "59:59 min"), (3600, "1:00 h"), (7320, "2:02 h")]
)
def test_time_left_in_words(seconds: float, text: str) -> None:
    assert progress.clock(seconds) == text


def test_a_line_a_minute_with_the_time_left_by_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    said: list[str] = []
    with progress.counted(said.append, "features", 400) as advance:
        for _ in range(13):
            now[0] += 10.0
            advance(10)
    assert said == ["features: 18%, 70 of 400, 5:30 min left"]


def test_an_inactive_bar_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    said: list[str] = []
    with progress.bar(said.append, "head", 2, active=False) as show:
        now[0] = 1000.0
        show(1, "half")
    assert not said
