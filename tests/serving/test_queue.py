"""The queue: nobody waits longer than its bound, whatever arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from odevit_serve.runtime.options import Priority
from odevit_serve.serving.queue import SHARE, RequestQueue


@dataclass(eq=False)
class Person:
    number: int
    priority: str


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["interactive", "bulk", "leave", "leave", "give up"]), max_size=120), st.randoms())
def test_fairness_bound(script: list[str], random: Any) -> None:
    queue: RequestQueue[Person] = RequestQueue()
    waiting: dict[Person, list[int]] = {}  # person -> [departures so far, bound]
    order: dict[str, list[Person]] = {p: [] for p in Priority}
    for number, action in enumerate([*script, *["leave"] * len(script)]):
        if action in order:
            person, ahead = Person(number, action), len(order[action])
            queue.push(person)
            order[action].append(person)
            own = ahead + 1
            waiting[person] = [0, SHARE * own if action == "bulk" else own + -(-own // (SHARE - 1))]
        elif action == "give up" and waiting:
            person = random.choice(list(waiting))
            assert queue.remove(person)
            order[person.priority].remove(person)
            del waiting[person]
        elif action == "leave" and queue:
            person = queue.pop()
            for count in waiting.values():
                count[0] += 1
            taken, bound = waiting.pop(person)
            assert taken <= bound
            assert order[person.priority].pop(0) is person  # first come, first served
    assert len(queue) == len(waiting) == 0
