"""Counts in Prometheus' form."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from odevit_serve.serving.counters import SECONDS, Durations
from odevit_serve.serving.metrics import _by, _counts, _durations


def buckets(metric: object) -> dict[str, float]:
    return {s.labels["le"]: s.value for s in metric.samples if s.name.endswith("_bucket")}  # type: ignore[attr-defined]


@given(st.lists(st.floats(0, 30)))
def test_buckets_of_durations_are_cumulative_and_end_in_all(seconds: list[float]) -> None:
    own = Durations()
    for value in seconds:
        own.add(value)
    found = buckets(_durations("a", "text", own))
    assert found["+Inf"] == len(seconds)
    assert [found[str(end)] for end in SECONDS] == [sum(value <= end for value in seconds) for end in SECONDS]


@given(st.dictionaries(st.integers(1, 20), st.integers(0, 9)))
def test_a_histogram_of_counts_loses_none_beyond_its_last_bucket(counts: dict[int, int]) -> None:
    metric = _counts("a", "text", counts, range(1, 9))
    found = buckets(metric)
    assert found["+Inf"] == sum(counts.values())
    assert found["8"] == sum(n for value, n in counts.items() if value <= 8)
    (total,) = [s.value for s in metric.samples if s.name == "a_sum"]
    assert total == sum(value * n for value, n in counts.items())


def test_each_reason_has_its_own_count() -> None:
    found = {s.labels["reason"]: s.value for s in _by("a", "text", {"late": 2, "full": 1}).samples}
    assert found == {"late": 2, "full": 1}
