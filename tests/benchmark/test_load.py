"""The load generator against servers that are written out here: what it sends, counts and times."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odevit_serve.benchmark.load import Load, generate

BODIES = [b"one", b"three three three", b"\r\n\r\n"]
Answer = Callable[[asyncio.StreamWriter, bytes, bytes], Awaitable[bool]]  # of a head and a body; False: hang up


def response(status: int = 200, body: bytes = b"{}", head: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d OK\r\n%sContent-Length: %d\r\n\r\n%s" % (status, head, len(body), body)


def asked_of(answer: Answer, **settings: Any) -> tuple[Load, list[tuple[bytes, bytes]], int]:
    """What a load saw of a server, the requests that came, and on how many connections."""
    seen: list[tuple[bytes, bytes]] = []
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                seen.append((head, await reader.readexactly(length)))
                if not await answer(writer, *seen[-1]):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def both() -> Load:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            given = {"clients": 3, "seconds": 30.0, **settings}
            return await generate(f"http://127.0.0.1:{port}", BODIES, **given)

    return asyncio.run(both()), seen, opened


async def well(writer: asyncio.StreamWriter, head: bytes, body: bytes) -> bool:
    writer.write(response(body=b'{"predictions": [{"steps": 3}, {"steps":5}]}', head=b'X-Note: "steps": 9\r\n'))
    return True


def test_as_many_requests_as_asked_for_on_a_connection_a_client() -> None:
    load, seen, opened = asked_of(well, most=40, path="/v1/x", kind="image/png", headers="X-Own: 1\r\n", images=2)
    assert (len(seen), opened) == (40, 3)
    assert {body for _, body in seen} == set(BODIES)
    for head, _ in seen:
        lines = head.decode().split("\r\n")
        assert lines[0] == "POST /v1/x HTTP/1.1"
        assert {"Host: 127.0.0.1", "Content-Type: image/png", "X-Own: 1"} <= set(lines)
    assert load.statuses == {200: 40}
    assert (load.answered, load.errors, load.lost) == (80, 0, 0)
    assert Counter(load.steps) == {3: 40, 5: 40}  # of the bodies alone
    assert len(load.latencies) == 40
    assert min(load.latencies) > 0
    assert load.images_per_second == pytest.approx(80 / load.seconds)


def test_a_client_draws_the_same_pictures_by_the_same_seed() -> None:
    draws = [[body for _, body in asked_of(well, clients=1, most=12, seed=seed)[1]] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_an_answer_in_pieces_is_one_answer() -> None:
    async def slowly(writer: asyncio.StreamWriter, head: bytes, body: bytes) -> bool:
        whole = response(body=b'{"steps": 7}')
        for piece in (whole[:9], whole[9:30], whole[30:-3], whole[-3:]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return True

    load, _, _ = asked_of(slowly, most=9)
    assert load.statuses == {200: 9}
    assert load.steps == [7] * 9


def test_refusals_are_counted_and_not_timed() -> None:
    async def refuse(writer: asyncio.StreamWriter, head: bytes, body: bytes) -> bool:
        writer.write(response(429, b'{"steps": 7}'))
        return True

    load, _, _ = asked_of(refuse, most=10)
    assert load.statuses == {429: 10}
    assert (load.latencies, load.steps, load.errors) == ([], [], 10)


def test_a_connection_that_is_to_be_closed_is_opened_anew() -> None:
    async def once(writer: asyncio.StreamWriter, head: bytes, body: bytes) -> bool:
        writer.write(response(head=b"Connection: close\r\n"))
        return False

    load, seen, opened = asked_of(once, most=6)
    assert len(seen) == opened == 6
    assert (load.statuses[200], load.lost) == (6, 0)


def test_an_answer_that_never_comes_is_lost() -> None:
    async def hang_up(writer: asyncio.StreamWriter, head: bytes, body: bytes) -> bool:
        writer.write(response()[:-1])
        return False

    load, seen, _ = asked_of(hang_up, most=5)
    assert (len(seen), load.lost, load.errors, load.latencies) == (5, 5, 5, [])


def test_a_server_that_is_not_there_loses_requests_until_time_is_up() -> None:
    from odevit_serve.benchmark.servers import free_port

    load = asyncio.run(generate(f"http://127.0.0.1:{free_port()}", BODIES, 2, 0.3))
    assert load.lost >= 2
    assert load.answered == 0


def test_the_sums() -> None:
    load = Load(2, seconds=2.0, latencies=[0.1 * (i + 1) for i in range(100)], steps=[3, 5])
    load.statuses.update({200: 100, 429: 3})
    load.lost = 1
    summary = load.summary()
    assert (summary["clients"], summary["images"], summary["images_per_second"]) == (2, 100, 50)
    assert summary["p50_ms"] == pytest.approx(5100)
    assert summary["p95_ms"] == pytest.approx(9600)
    assert summary["p99_ms"] == pytest.approx(10000)
    assert summary["mean_depth"] == 4
    assert summary["errors"] == 4
    nothing = Load(1).summary()
    assert (nothing["images"], nothing["images_per_second"], nothing["mean_depth"]) == (0, 0, None)
    assert math.isnan(nothing["p99_ms"])


@given(st.lists(st.floats(0.0, 100.0), min_size=1), st.floats(0, 1))
def test_a_percentile_is_one_of_the_values_with_its_share_below(values: list[float], share: float) -> None:
    found = Load(1, latencies=values).percentile(share)
    assert found in values
    assert sum(value <= found for value in values) >= min(len(values), share * len(values))
    assert sum(value < found for value in values) <= share * len(values)
