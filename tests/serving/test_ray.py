"""Ray Serve for real: a local cluster with two replicas of two models, replaced and killed while they work."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from camera import shots
from PIL import Image
from ports import own_port
from servers import Process, png, until

from odevit_serve.data.datasets import Images
from odevit_serve.errors import UsageError
from odevit_serve.guarantee.calibrate import calibrate

pytest.importorskip("ray.serve", reason="needs the extra `ray`")
pytestmark = pytest.mark.slow
PICTURES = [png(i) for i in range(16)]


@pytest.fixture(scope="module")
def folder(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a guarantee that can be audited, which a test may change."""
    own, taken = tmp_path_factory.mktemp("ray"), shots(600, 0)
    images = Images([str(i) for i in range(600)], None, (), lambda i: Image.fromarray(taken[i]), in_memory=True)
    calibrate(tiny_bundle, images, 0.03, 0.05, "travel", threads=1, output=own / "first")
    shutil.copytree(own / "first", own / "other")
    return own


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Process]:
    options = ["--ray", "--replicas", "2", "--port", str(own_port()), "--slots", "8", "--grace", "5"]
    options += [f"other={folder / 'other'}", "--watch", "--audit", "1"]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_MEMORY_MONITOR": "1", "RAY_worker_niceness": "0"}
    # For a machine that does other things as well: Ray gives its own processes 5 to 30 s to start.
    quiet |= {"RAY_raylet_start_wait_time_s": "200", "RAY_agent_register_timeout_ms": "200000"}
    quiet |= {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "100", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "100"}
    with Process(folder / "first", *options, environment=quiet, patience=400) as process:
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
        self.asked = self.answered = self.retried = 0
        self.busy = False  # ask on, whatever the count
        self.by: Counter[str] = Counter()
        self.failed: Counter[Any] = Counter()


async def patient(address: str, clients: int, count: int, tally: Tally, during: Any = None) -> None:
    """Each client asks `count` times, and again after an error that leaves the request unanswered."""
    # A prediction changes nothing on the server, so asking twice does no harm.
    async with httpx.AsyncClient(base_url=address, timeout=60, limits=httpx.Limits(max_connections=clients)) as client:

        async def one(seed: int) -> None:
            for turn in itertools.count():
                if turn >= count and not tally.busy:
                    return
                tally.asked += 1
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


def by_replica(cluster: Process, path: str, wanted: Callable[[httpx.Response], bool]) -> dict[str, httpx.Response]:
    """What the two replicas answer, once both answer as wanted."""
    found: dict[str, httpx.Response] = {}

    def both() -> bool:
        with httpx.Client(base_url=cluster.address, timeout=30) as client:  # a connection of its own each time
            answer = client.get(path)
        if answer.status_code == 200 and wanted(answer):
            found[answer.headers["x-replica"]] = answer
        return len(found) == 2

    until(both, 120)
    return found


def test_every_replica_has_both_models_and_audits_of_its_own(cluster: Process) -> None:
    tally = Tally()
    asyncio.run(patient(cluster.address, 8, 10, tally))  # by the first model
    for answer in by_replica(cluster, "/v1/models", lambda _: True).values():
        assert [model["name"] for model in answer.json()["models"]] == ["random", "other"]
    with httpx.Client(base_url=cluster.address, timeout=30) as client:
        assert client.post("/v1/models/other/predict", content=PICTURES[0]).json()["model"] == "other"

    def followed(answer: httpx.Response) -> bool:
        """All that this replica has drawn, of either model."""
        ended = count(answer.text, "images") + count(answer.text, "dropped")
        return ended == count(answer.text, "drawn") > 0

    found = by_replica(cluster, "/metrics", followed)
    assert sum(count(answer.text, "drawn") for answer in found.values()) >= 80 + 1


def count(metrics: str, name: str) -> float:
    return sum(map(float, re.findall(rf"^odevit_audit_{name}_total{{.*}} (\S+)$", metrics, re.MULTILINE)))


def relicense(bundle: Path, text: str) -> None:
    config = json.loads((bundle / "config.json").read_text())
    (bundle / "new").write_text(json.dumps({**config, "license": text}))
    os.replace(bundle / "new", bundle / "config.json")


def test_changed_files_are_taken_up_by_both_replicas_in_place(cluster: Process, folder: Path) -> None:
    before = {child.pid for child in replicas(cluster)}
    tally = Tally()

    async def replace(tally: Tally) -> None:
        relicense(folder / "first", "in place")

    asyncio.run(patient(cluster.address, 8, 25, tally, replace))
    assert (tally.answered, tally.retried) == (8 * 25, 0)
    by_replica(cluster, "/v1/model", lambda answer: answer.json()["license"] == "in place")
    assert {child.pid for child in replicas(cluster)} == before


def test_replicas_are_replaced_one_after_the_other(cluster: Process, folder: Path) -> None:
    """Under load, and everyone is answered; files that cannot be served change nothing."""
    before = {child.pid for child in replicas(cluster)}
    whole = (folder / "other" / "step.onnx").read_bytes()
    (folder / "other" / "step.onnx").write_bytes(whole[: len(whole) // 2])
    cluster.process.send_signal(signal.SIGHUP)
    until(lambda: any("not replaced" in line for line in cluster.lines), 60)
    assert {child.pid for child in replicas(cluster)} == before
    (folder / "other" / "step.onnx").write_bytes(whole)
    tally = Tally()

    async def replace(tally: Tally) -> None:
        tally.busy = True
        cluster.process.send_signal(signal.SIGHUP)
        while not any("replaced: revision" in line for line in cluster.lines) and cluster.process.poll() is None:
            await asyncio.sleep(0.05)
        tally.busy = False

    asyncio.run(patient(cluster.address, 4, 10, tally, replace))
    print(f"answered {tally.answered}, asked again {tally.retried} times: {dict(tally.failed)}")
    assert tally.answered == tally.asked
    until(lambda: len(replicas(cluster)) == 2, 60)
    assert not {child.pid for child in replicas(cluster)} & before


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
