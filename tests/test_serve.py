"""Tests the command `spec-runtime serve`: processes, signals, what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import spec_runtime
from spec_runtime import cli

for module in ("onnx", "onnxruntime", "fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(module, reason=f"{module} is not installed")
httpx = pytest.importorskip("httpx")

PATIENCE = 60.0  # seconds; a loaded machine starts processes slowly
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = {"prompt": "abc", "max_tokens": 6, "temperature": 0}
# A test fails where a server waits in vain for a worker that has died.
MAIN = (
    "from spec_runtime.cli import main; from spec_runtime.serving import processes; "
    "processes.HEALTH_SECONDS = 3600; main()"
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.append(str(Path(__file__).parent / "fuzz"))
    import tiny_bundle

    return tiny_bundle.write(tmp_path_factory.mktemp("serve") / "tiny")


@contextmanager
def running(bundle: Path, log: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs the command; yields its process and its address once it says it."""
    command = [sys.executable, "-c", MAIN, "serve", str(bundle), "--port", "0", *options]
    environment = os.environ | {"XDG_CACHE_HOME": str(log.parent / "cache")}
    with open(log, "w") as stdout:
        process = subprocess.Popen(
            command,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # so that it has a process group, which Ctrl-C goes to
        )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, line + process.stderr.read()
        yield process, found[0]
    finally:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(is_true: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def is_ready(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/ready", timeout=1).status_code == 200)
    except httpx.TransportError:
        return False


def test_a_server_ends_gracefully_on_sigterm(bundle: Path, tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    environment = "SPEC_RUNTIME_TEST_KEY"
    os.environ[environment] = "secret"
    try:
        with running(bundle, log, "--api-key-env", environment, "--name", "mine") as (process, url):
            wait_until(lambda: is_ready(url))
            headers = {"Authorization": "Bearer secret"}
            assert httpx.get(f"{url}/v1/models").status_code == 401
            (model,) = httpx.get(f"{url}/v1/models", headers=headers).json()["data"]
            assert model["id"] == "mine"
            reply = httpx.post(url + COMPLETIONS, json=ASK, headers=headers, timeout=PATIENCE)
            assert reply.json()["usage"]["completion_tokens"] == 6
            assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 403
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""
    finally:
        del os.environ[environment]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[-2]["completion_tokens"] == 6
    assert [line["status"] for line in lines[-4:]] == [401, 200, 200, 403]


def test_workers_share_the_port_and_one_that_dies_is_replaced(bundle: Path, tmp_path: Path) -> None:
    with running(bundle, tmp_path / "log", "--workers", "2", "--threads", "1") as (process, url):
        wait_until(lambda: is_ready(url))

        def ask() -> None:
            reply = httpx.post(url + COMPLETIONS, json=ASK, timeout=PATIENCE)
            assert reply.json()["usage"]["completion_tokens"] == 6, reply.text

        for _ in range(6):
            ask()
        text = httpx.get(f"{url}/metrics").text
        counted = re.search(r'specsplit_answers_total\{finish_reason="length"\} (\S+)', text)
        assert counted is not None
        assert float(counted[1]) == 6, "the counts of both processes together"
        children = workers_of(process.pid)
        assert len(children) == 2
        os.kill(children[0], signal.SIGKILL)
        wait_until(lambda: len(set(workers_of(process.pid)) - {children[0]}) == 2)
        wait_until(lambda: is_ready(url))
        ask()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert not is_ready(url)


def test_workers_that_cannot_start_end_the_command(bundle: Path, tmp_path: Path) -> None:
    options = ("--workers", "2", "--drafter", "hydra")
    with running(bundle, tmp_path / "log", *options) as (process, _):
        assert process.wait(PATIENCE) == 2
        assert process.stderr is not None
        *_, line = process.stderr.read().splitlines()
    assert line == "error: a worker process could not start, see above; serve with --workers 1"


def test_ctrl_c_while_workers_start_is_quiet(bundle: Path, tmp_path: Path) -> None:
    with running(bundle, tmp_path / "log", "--workers", "2") as (process, _):
        wait_until(lambda: len(workers_of(process.pid)) == 2)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_loopback_may_be_written_in_capitals(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from spec_runtime.serving import processes, settings

    bind = processes.bind
    monkeypatch.setattr(processes, "bind", lambda host, port: bind("127.0.0.1", port))
    served: list[processes.ServedBundle] = []

    def serve(bundle: processes.ServedBundle, *_: object) -> None:
        served.append(bundle)

    monkeypatch.setattr(processes, "serve", serve)
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", str(bundle), "--port", "0", "--host", "LocalHost"])
    assert end.value.code == 0, capsys.readouterr().err
    assert served[0].settings.hosts == settings.LOOPBACK


def test_conversations_in_turn_are_kept_for_both(bundle: Path, tmp_path: Path) -> None:
    talks = [[{"role": "user", "content": letter * 40}] for letter in "ab"]
    cached: list[list[int]] = [[], []]
    asked = []
    with running(bundle, tmp_path / "log", "--kept-mb", "1") as (_, url):
        for _ in range(2):
            for number, talk in enumerate(talks):
                body = {"messages": talk, "max_tokens": 4, "temperature": 0}
                reply = httpx.post(url + CHAT, json=body, timeout=PATIENCE).json()
                asked.append((list(talk), reply["choices"][0]["message"]["content"]))
                usage = reply["usage"]
                cached[number].append(usage["prompt_tokens_details"]["cached_tokens"])
                prompt_tokens = usage["prompt_tokens"]
                talk += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "c"}]
    first = prompt_tokens - len("yes</>\n<user>c</>\n<assistant>")  # the prompt of the first turn
    num_shared = len("<user>")
    assert cached[0][0] == 0
    assert cached[1][0] <= num_shared
    for number in range(2):
        assert cached[number][1] >= first - 1, "though the other conversation came between"
    with spec_runtime.load(bundle) as engine:
        for messages, text in asked:
            plain = engine.generate(messages, max_new_tokens=4, reuse=False)
            assert text == plain.text, "kept rows change no answer"


def workers_of(parent: int) -> list[int]:
    """Returns the processes of a parent that run an engine, by Linux's /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has just ended
        state, its_parent = status.rpartition(")")[2].split()[:2]
        if int(its_parent) == parent and state != "Z" and b"spawn_main" in command:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--api-key-env", "NO_SUCH_VARIABLE_HERE"], "got --api-key-env NO_SUCH_VARIABLE_HERE"),
        (["--timeout", "0"], "got timeout 0.0, expected seconds above 0"),
        (["--drafter", "hydra"], "got drafter 'hydra', expected one of"),
        (["--host", "192.168..1"], "got --host 192.168..1, expected an address or a name"),
        (["--grace", "inf"], "got --grace inf, expected a number of seconds"),
        (["--host", "no.such.host.invalid"], "got --host no.such.host.invalid"),
        (["--workers", "0"], "Invalid value for '--workers'"),
        (["--max-prompt", "0"], "Invalid value for '--max-prompt'"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    bundle: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", str(bundle), "--port", "0", *options])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_port_in_use_is_one_line(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(SystemExit) as end:
            cli.main(["serve", str(bundle), "--port", port])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"--port {port}, expected an address that is free here" in error
    assert error.count("\n") == 1


def test_the_manifest_for_kubernetes_has_options_and_addresses_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    yaml = pytest.importorskip("yaml")
    app = pytest.importorskip("spec_runtime.serving.app")
    text = (Path(__file__).parents[1] / "examples/kubernetes.yaml").read_text()
    deployment, service, scaler = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][:2] == ["spec-runtime", "serve"]
    with pytest.raises(SystemExit):
        cli.main([*container["command"][1:], *container["args"]])
    error = capsys.readouterr().err
    assert error.startswith("error: /bundle: "), "the options are right, only the bundle is missing"
    paths = {route.path for route in app.router.routes}
    probes = [container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert {probe["httpGet"]["path"] for probe in probes} == {"/health", "/ready"} <= paths
    (port,) = container["ports"]
    assert str(port["containerPort"]) in container["args"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    grace = int(container["args"][container["args"].index("--grace") + 1])
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > grace + sleep
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]
    name = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    metrics = pytest.importorskip("spec_runtime.serving.metrics")
    assert f"{name} 0.0" in metrics.Metrics().scrape().decode()
