"""Ray Serve for real: a local cluster with two replicas, one of which is killed while they work."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ports import own_port
from servers import Process, png, until

from odevit_serve.errors import UsageError

pytest.importorskip("ray.serve", reason="needs the extra `ray`")
pytestmark = pytest.mark.slow
PICTURES = [png(i) for i in range(16)]


@pytest.fixture(scope="module")
def cluster(tiny_bundle: Path) -> Iterator[Process]:
    options = ["--ray", "--replicas", "2", "--port", str(own_port()), "--slots", "8", "--grace", "5"]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_MEMORY_MONITOR": "1"}
    with Process(tiny_bundle, *options, environment=quiet, patience=180) as process:
        with httpx.Client(timeout=30) as client:
            process.wait_ready(client)
        yield process
        process.process.send_signal(signal.SIGTERM)
        process.process.wait(60)
        assert process.process.returncode == 0


def replicas(process: Process) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.process.pid).children(recursive=True):
        try:
            if any("ServeReplica" in part for part in child.cmdline()[:1]):
                found.append(child)
        except psutil.Error:
            continue
    return found


class Tally:
    """What a set of clients saw who ask again when Ray could not answer."""

    def __init__(self) -> None:
        self.answered = self.retried = 0
        self.by: Counter[str] = Counter()
        self.failed: Counter[Any] = Counter()


async def patient(address: str, clients: int, count: int, tally: Tally, during: Any = None) -> None:
    """Each client asks `count` times, and again after an error that leaves the request unanswered."""
    # A prediction changes nothing on the server, so asking twice does no harm.
    async with httpx.AsyncClient(base_url=address, timeout=60, limits=httpx.Limits(max_connections=clients)) as client:

        async def one(seed: int) -> None:
            for turn in range(count):
                for attempt in range(20):
                    try:
                        answer = await client.post("/v1/predict", content=PICTURES[(seed + turn) % 16])
                    except httpx.TransportError as error:
                        tally.failed[type(error).__name__] += 1
                    else:
                        if answer.status_code == 200 and answer.json()["predictions"][0]["label"]:
                            tally.answered += 1
                            tally.by[answer.headers["x-replica"]] += 1
                            break
                        tally.failed[answer.status_code] += 1
                    tally.retried += 1
                    await asyncio.sleep(0.05 * 2 ** min(attempt, 5))

        tasks = [asyncio.create_task(one(seed)) for seed in range(clients)]
        if during is not None:
            await during(tally)
        await asyncio.gather(*tasks)


def test_load_is_spread_over_two_replicas(cluster: Process) -> None:
    tally = Tally()
    asyncio.run(patient(cluster.address, 8, 25, tally))
    assert tally.answered == 200
    assert tally.retried == 0
    assert len(tally.by) == 2
    assert min(tally.by.values()) > 40


def test_the_whole_interface_is_there(cluster: Process) -> None:
    with httpx.Client(base_url=cluster.address, timeout=30) as client:
        assert client.get("/v1/model").json()["limits"]["slots"] == 8
        assert client.post("/v1/predict", content=b"no").status_code == 415
        assert client.post("/v1/predict?max_steps=0", content=PICTURES[0]).status_code == 422
        assert client.post("/v1/attention", content=PICTURES[0]).headers["content-type"] == "image/png"
        assert client.get("/v2/models/random").json()["versions"] == ["1"]
        assert "odevit_depth_steps" in client.get("/metrics").text


def test_a_killed_replica_is_replaced_and_everyone_is_answered(cluster: Process) -> None:
    before = replicas(cluster)
    assert len(before) == 2
    tally = Tally()

    async def kill(tally: Tally) -> None:
        while tally.answered < 60:
            await asyncio.sleep(0.005)
        os.kill(before[0].pid, signal.SIGKILL)

    asyncio.run(patient(cluster.address, 16, 40, tally, kill))
    assert tally.answered == 16 * 40  # every request, some at the second attempt
    # Ray does not repeat a request that a replica had begun: the proxy answers 500, and the client asks again.
    assert set(tally.failed) <= {500, 503, "ReadError", "RemoteProtocolError"}
    print(f"answered {tally.answered}, asked again {tally.retried} times: {dict(tally.failed)}")

    def replaced() -> bool:
        now = {child.pid for child in replicas(cluster)}
        return len(now) == 2 and before[0].pid not in now

    until(replaced, 60)
    tally, limit = Tally(), time.monotonic() + 60
    while len(tally.by) < 2 and time.monotonic() < limit:
        asyncio.run(patient(cluster.address, 8, 10, tally))
    assert len(tally.by) == 2  # the new one works too


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        ("3", {"num_replicas": 3}),
        ("1:4", {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 32}}),
    ],
)
def test_replicas(replicas: str, options: dict[str, Any]) -> None:
    from odevit_serve.serving.ray import scaling

    assert scaling(replicas, 32) == options


@pytest.mark.parametrize("wrong", ["0", "x", "4:1", "1:", ""])
def test_replicas_that_make_no_sense(wrong: str) -> None:
    from odevit_serve.serving.ray import scaling

    with pytest.raises(UsageError, match="replicas"):
        scaling(wrong, 32)


def test_the_application_is_built_from_text() -> None:
    from odevit_serve.serving.ray import app

    deployment = app({"slots": "16", "replicas": "1:2", "queued": "100"})._bound_deployment
    config = deployment._deployment_config
    assert config.max_ongoing_requests == 32
    assert config.max_queued_requests == 100
    assert config.autoscaling_config.max_replicas == 2
    with pytest.raises(UsageError, match="colour"):
        app({"colour": "red"})


def test_the_key_of_the_environment_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from odevit_serve.serving.ray import Arguments, app

    assert Arguments.parse({}).options["api_key"] is None
    monkeypatch.setenv("ODEVIT_API_KEY", "sesam")
    assert Arguments.parse({}).options["api_key"] == "sesam"
    assert app({})._bound_deployment.init_args[0].options["api_key"] == "sesam"
    assert Arguments.parse({"options": {"api_key": "other"}}).options["api_key"] == "other"
    monkeypatch.setenv("ODEVIT_API_KEY", " ")
    with pytest.raises(UsageError, match="the API key is empty"):
        app({})


def test_the_yaml_of_the_documentation_is_one_that_ray_takes() -> None:
    import re

    import yaml
    from ray.serve.schema import ServeDeploySchema

    from odevit_serve.serving.ray import app

    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"```yaml\n(applications:.*?)```", text, re.DOTALL)
    schema = ServeDeploySchema.model_validate(yaml.safe_load(found))
    assert schema.applications[0].import_path == "odevit_serve.serving.ray:app"
    assert app(schema.applications[0].args)
