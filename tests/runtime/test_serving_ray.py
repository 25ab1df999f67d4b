"""Serves a tiny bundle by a local Ray cluster, kills a replica under load, and checks what is lost.

The cluster is started once, which takes most of the time here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gates
import pytest
from gates import GatedRuns
from served import COMPLETIONS, metrics, open_request

for module in ("onnx", "onnxruntime"):
    pytest.importorskip(module, reason=f"{module} is not installed")
httpx = pytest.importorskip("httpx")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
for check in ("READY", "HEALTH"):  # of Ray's proxy, which a loaded machine starts slowly
    os.environ[f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S"] = "60"
ray = pytest.importorskip("ray", reason="ray is not installed; the extra ray has it")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray uses parts of pydantic that will go
    from ray import serve
    from ray.serve.schema import ServeDeploySchema
import tiny_bundle  # noqa: E402

import spec_runtime  # noqa: E402
from spec_runtime.bundle import manifest as bundles  # noqa: E402
from spec_runtime.files.installed import install  # noqa: E402
from spec_runtime.serve import ray_app  # noqa: E402

PATIENCE = 60.0  # seconds; a loaded machine starts processes slowly
NUM_REPLICAS, MAX_ONGOING, MAX_QUEUED = 2, 4, 16
MAX_LENGTH = 4000
LONG = {"prompt": "long", "max_tokens": 3900, "temperature": 1, "seed": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_bundle.write(tmp_path_factory.mktemp("ray") / "tiny")
    manifest = bundles.read(folder).manifest
    target = dataclasses.replace(manifest.target, max_length=MAX_LENGTH)
    bundles.write_manifest(folder, dataclasses.replace(manifest, target=target))
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs a cluster while the tests of this file run; nothing of it is left behind."""
    at_sigterm = signal.getsignal(signal.SIGTERM)  # Ray sets its own
    with (
        pytest.MonkeyPatch.context() as patched,
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,  # sockets: a short path
    ):
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # mapped weights
        ray.init(
            num_cpus=NUM_REPLICAS,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            yield
            serve.shutdown()
        finally:
            ray.shutdown()
            signal.signal(signal.SIGTERM, at_sigterm)
        wait_until(lambda: not commands_with(folder))


@pytest.fixture(scope="module")
def url(cluster: None, bundle: Path) -> str:
    """Returns the address of the application."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    arguments = ray_app.Arguments(
        bundle=str(bundle),
        num_replicas=NUM_REPLICAS,
        max_ongoing_requests=MAX_ONGOING,
        max_queued_requests=MAX_QUEUED,
        health_check_seconds=1,
    )
    serve.run(ray_app.build(arguments))
    return f"http://127.0.0.1:{port}"


def commands_with(text: str) -> list[str]:
    """Returns the commands of running processes that have this text, by Linux's /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [command for command in found if text in command]


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=url, timeout=PATIENCE, limits=limits) as made:
        yield made


wait_until = functools.partial(gates.wait_until, patience=PATIENCE)


def replicas() -> dict[str, Any]:
    """Returns the actors of the replicas by their names, also of those that are just starting."""
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    prefix = "SERVE_REPLICA::default#EngineReplica#"
    return {
        name: ray.get_actor(name, namespace="serve") for name in names if name.startswith(prefix)
    }


def num_ongoing() -> dict[str, int]:
    """Returns how many requests each replica has."""
    return {
        name: ray.get(actor.get_num_ongoing_requests.remote()) for name, actor in replicas().items()
    }


def kill(name: str) -> None:
    """Kills the process of a replica, as the kernel does when memory runs out."""
    actor = ray.get_actor(name, namespace="serve")
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


def counted(client: Any, name: str) -> float:
    """Returns a number from the metrics, 0 for one that is not there."""
    return metrics(client).get(name, 0.0)


@dataclasses.dataclass
class Stream:
    """What a client got of a stream."""

    text: str = ""
    is_done: bool = False
    num_events: int = 0


def read_stream(client: Any, body: dict[str, Any], stream: Stream) -> Stream:
    with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if not line:
                continue
            assert not stream.is_done, "something came after the end"
            data = line.removeprefix("data: ")
            stream.num_events += 1
            if data == "[DONE]":
                stream.is_done = True
            else:
                stream.text += json.loads(data)["choices"][0]["text"]
    return stream


def ask(client: Any, body: dict[str, Any]) -> Any:
    reply = client.post(COMPLETIONS, json=body)
    assert reply.status_code == 200, reply.text
    return reply


def text_of(reply: Any) -> str:
    return str(reply.json()["choices"][0]["text"])


def bodies(number: int, first_seed: int) -> list[dict[str, Any]]:
    """Returns `number` requests, a third of them greedy."""
    return [
        {
            "prompt": f"prompt {first_seed + i}",
            "max_tokens": 300,
            "temperature": 0 if i % 3 == 0 else 0.9,
            "seed": first_seed + i,
            "ignore_eos": True,
        }
        for i in range(number)
    ]


def expected_texts(bundle: Path, asked: list[dict[str, Any]]) -> list[str]:
    """Returns the undisturbed answers, by an engine in this process."""
    texts = []
    with spec_runtime.load(bundle, threads=1, verify=False) as engine:
        for body in asked:
            options = {name: body[name] for name in ("temperature", "seed", "ignore_eos")}
            result = engine.generate(
                body["prompt"], raw=True, max_new_tokens=body["max_tokens"], **options
            )
            texts.append(result.text)
    return texts


def test_a_replica_whose_engine_hangs_or_is_closed_is_not_healthy(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_app, "set_up_logs", lambda: None)  # those of this process stay
    arguments = ray_app.Arguments(bundle=str(bundle), timeout=0.01)
    replica = ray_app.EngineReplica(arguments)
    service = replica._service
    runs = GatedRuns(service.engine)

    async def hang() -> None:
        replica.check_health()
        engine = service.engine
        job = service.queue.ask(lambda: [engine.prepare("abc", max_new_tokens=9)])
        await asyncio.to_thread(runs.wait_for_run)
        while service.queue.seconds_in_step < 0.02:
            await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match=r"the engine has been in one step for \d+ s"):
            replica.check_health()
        runs.let_through()
        assert [chunk async for _, chunk in job]
        replica.check_health()
        await service.close()

    asyncio.run(hang())
    with pytest.raises(RuntimeError, match="this engine is closed"):
        replica.check_health()


@gates.in_loop
async def test_a_replica_has_the_guards_of_the_server(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_app, "set_up_logs", lambda: None)
    monkeypatch.setenv("THE_KEY", "secret")
    arguments = ray_app.Arguments(bundle=str(bundle), api_key_env="THE_KEY", hosts=("here",))
    replica = ray_app.EngineReplica(arguments)
    transport = httpx.ASGITransport(app=replica.__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        body = {"prompt": "hello", "max_tokens": 3}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        reply = await client.post(COMPLETIONS, json=body, headers=headers)
        assert reply.status_code == 200
        assert "x-request-id" not in reply.headers, "Ray's proxy gives requests their ids"
        reply = await client.get("/health", headers={"Host": "elsewhere"})
        assert reply.json()["error"]["code"] == "unknown_host"
    await replica._service.close()


def test_without_ray_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "spec_runtime.serve.ray_app")
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("spec_runtime.serve.ray_app")
    assert str(caught.value) == f"Ray Serve is not installed: {install('ray')}"


def test_the_examples_config_is_one_of_ray_and_of_ours() -> None:
    yaml = pytest.importorskip("yaml")
    path = Path(__file__).parents[2] / "examples/ray_serve.yaml"
    config = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    (application,) = config.applications
    assert application.import_path == "spec_runtime.serve.ray_app:build"
    arguments = ray_app.Arguments.model_validate(application.args)
    assert isinstance(ray_app.build(arguments), serve.Application)
    assert arguments.scale == {"autoscaling_config": application.args["autoscaling_config"]}


def test_arguments_come_as_text_from_the_command_line() -> None:
    arguments = ray_app.Arguments.model_validate(
        {"bundle": "b", "num_replicas": "2", "lookup": "false", "timeout": "9.5"}
    )
    assert arguments.scale == {"num_replicas": 2}
    options = arguments.load_options
    assert (options["lookup"], options["threads"]) == (False, 1)
    with pytest.raises(ValueError, match="num_replicas and autoscaling_config exclude each other"):
        ray_app.Arguments(bundle="b", num_replicas=2, autoscaling_config={"max_replicas": 3})
    for wrong in ({"num_replica": 2}, {"num_cpus": 0}, {"timeout": 0}, {"grace": "long"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ray_app.Arguments.model_validate({"bundle": "b", **wrong})


def answer_or_none(client: Any, body: dict[str, Any]) -> str | None:
    """Returns the answer to a request, None if its replica died."""
    reply = client.post(COMPLETIONS, json=body)
    assert reply.status_code in (200, 500), reply.text
    return text_of(reply) if reply.status_code == 200 else None


def test_a_replica_that_dies_is_replaced_and_only_its_requests_fail(
    client: Any, bundle: Path
) -> None:
    asked = bodies(12, 100)
    expected = expected_texts(bundle, asked)
    cut = Stream()
    with ThreadPoolExecutor(1 + len(asked)) as pool:
        last = pool.submit(read_stream, client, LONG, cut)
        wait_until(lambda: cut.num_events > 3)
        (victim,) = (name for name, number in num_ongoing().items() if number)
        jobs = [pool.submit(answer_or_none, client, body) for body in asked]
        wait_until(lambda: num_ongoing()[victim] == MAX_ONGOING)
        kill(victim)
        answers = [job.result(PATIENCE) for job in jobs]
        assert not cut.is_done, "the replica died while it wrote this stream"
        with pytest.raises(httpx.RemoteProtocolError):  # the connection breaks
            last.result(PATIENCE)
    failed = [i for i, text in enumerate(answers) if text is None]
    assert len(failed) < MAX_ONGOING, "those that the dead replica had, beside the stream"
    undisturbed = [text for i, text in enumerate(expected) if i not in failed]
    assert [text for text in answers if text is not None] == undisturbed
    assert not cut.is_done
    wait_until(lambda: len(set(replicas()) - {victim}) == NUM_REPLICAS)
    for body, text in zip(asked[:4], expected, strict=False):
        assert text_of(ask(client, body)) == text, "by the old replica or by the new one"


def test_a_client_that_leaves_ends_its_answer(client: Any) -> None:
    with client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert sum(num_ongoing().values()) == 1
    wait_until(lambda: sum(num_ongoing().values()) == 0)
    assert text_of(ask(client, {**LONG, "max_tokens": 3}))
    # each replica counts what it answered, and the proxy asks any of them
    wait_until(lambda: counted(client, 'answers_total{finish_reason="cancelled"}') > 0)


def test_a_full_queue_is_503(url: str, client: Any) -> None:
    with contextlib.ExitStack() as opened:
        answers = opened.enter_context(selectors.DefaultSelector())
        refused: list[Any] = []

        def is_one_refused() -> bool:
            """Asks once more, and waits a while where a refusal is due: Ray lets some more in where
            many come at the same time."""
            answers.register(
                opened.enter_context(open_request(url, COMPLETIONS, LONG)), selectors.EVENT_READ
            )
            is_due = len(answers.get_map()) > NUM_REPLICAS * MAX_ONGOING + MAX_QUEUED
            refused.extend(key.fileobj for key, _ in answers.select(1.0 if is_due else 0))
            return bool(refused)

        wait_until(is_one_refused)
        assert len(answers.get_map()) > NUM_REPLICAS * MAX_ONGOING + MAX_QUEUED
        assert refused[0].recv(65536).startswith(b"HTTP/1.1 503")
    # All have left now: those that waited are never begun, and the replicas are free at once.
    wait_until(lambda: sum(num_ongoing().values()) == 0)
    assert text_of(ask(client, {**LONG, "max_tokens": 3}))


def test_a_stop_finishes_what_replicas_have(client: Any, bundle: Path) -> None:
    """The last test here: it deletes the application while an answer is written."""
    body = {**LONG, "max_tokens": 2000}
    (expected,) = expected_texts(bundle, [body])
    stream = Stream()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(read_stream, client, body, stream)
        wait_until(lambda: stream.num_events > 3)
        serve.delete("default")
        job.result(PATIENCE)
    assert stream.is_done
    assert stream.text == expected
    assert not replicas()
