"""Tests the command `spec-runtime serve`: processes, signals, what it refuses."""

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import gates
import pytest
from served import CHAT, COMPLETIONS, HELLO, in_process
from small import Run
from test_trials import BOMB, as_format

import spec_runtime
from spec_runtime.serve import app, processes, settings
from spec_runtime.serve.metrics import Metrics

httpx = pytest.importorskip("httpx")
for module in ("onnx", "onnxruntime"):
    pytest.importorskip(module, reason=f"{module} is not installed")
import tiny_bundle  # noqa: E402

PATIENCE = 60.0  # seconds; a loaded machine starts processes slowly
ASK = {"prompt": "abc", "max_tokens": 6, "temperature": 0}
# A test fails where a server waits in vain for a worker that has died.
MAIN = (
    "from spec_runtime.cli import main; from spec_runtime.serve import processes; "
    "processes.HEALTH_SECONDS = 3600; main()"
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle.write(tmp_path_factory.mktemp("serve") / "tiny")


@contextmanager
def running(bundle: Path, log: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs the command; yields its process and its address once it says it."""
    command = [sys.executable, "-c", MAIN, "serve", str(bundle), "--port", "0"]
    command += ["--no-profile", *options]  # which says nothing before it serves
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


wait_until = functools.partial(gates.wait_until, patience=PATIENCE)


def is_ready(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/ready", timeout=1).status_code == 200)
    except httpx.TransportError:
        return False


def complete(url: str, **headers: str) -> None:
    """Asks for a short answer and checks how long it is."""
    reply = httpx.post(url + COMPLETIONS, json=ASK, headers=headers, timeout=PATIENCE)
    assert reply.json()["usage"]["completion_tokens"] == 6, reply.text


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Waits for the end of the process; returns its exit code and what it said."""
    assert process.stderr is not None
    return process.wait(PATIENCE), process.stderr.read()


def test_a_server_ends_gracefully_on_sigterm(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "access.jsonl"
    monkeypatch.setenv("SPEC_RUNTIME_TEST_KEY", "secret")
    options = ("--api-key-env", "SPEC_RUNTIME_TEST_KEY", "--name", "mine")
    with running(bundle, log, *options) as (process, url):
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{url}/v1/models").status_code == 401, "it listens once it says so"
        (model,) = httpx.get(f"{url}/v1/models", headers=headers).json()["data"]
        assert model["id"] == "mine"
        complete(url, **headers)
        assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 403
        process.send_signal(signal.SIGTERM)
        assert end(process) == (0, "")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[-2]["completion_tokens"] == 6
    assert [line["status"] for line in lines[-4:]] == [401, 200, 200, 403]


@pytest.mark.slow
def test_a_stop_cuts_off_a_grammar_that_does_not_end(bundle: Path, tmp_path: Path) -> None:
    with running(bundle, tmp_path / "log", "--grace", "1") as (process, url):
        body = {"messages": HELLO, "response_format": as_format(BOMB)}
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(httpx.post, url + CHAT, json=body, timeout=PATIENCE)
            wait_until(lambda: "running_requests 1" in httpx.get(f"{url}/metrics").text)
            children = workers_of(process.pid, b"trial_process")
            assert children
            process.send_signal(signal.SIGTERM)
            assert end(process)[0] == 0
            assert reply.result().status_code == 503
        assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_a_process_ends_though_a_thread_of_its_server_never_does() -> None:
    code = """if True:
        import asyncio, threading
        from spec_runtime.serve.processes import EndingApp

        async def app(scope, receive, send):
            await receive()
            threading.Event().wait()

        async def stop():
            return {"type": "lifespan.shutdown"}

        asyncio.run(EndingApp(app, seconds=0.1)({"type": "lifespan"}, stop, None))
    """
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=PATIENCE)
    assert ended.returncode == 1
    assert ended.stderr == b"the server is ended 0.1 s after its stop: a request did not end\n"


@pytest.mark.slow
def test_workers_share_the_port_and_one_that_dies_is_replaced(bundle: Path, tmp_path: Path) -> None:
    with running(bundle, tmp_path / "log", "--workers", "2", "--threads", "1") as (process, url):
        wait_until(lambda: is_ready(url))
        for _ in range(6):
            complete(url)
        text = httpx.get(f"{url}/metrics").text
        counted = re.search(r'specsplit_answers_total\{finish_reason="length"\} (\S+)', text)
        assert counted is not None
        assert float(counted[1]) == 6, "the counts of both processes together"
        children = workers_of(process.pid)
        assert len(children) == 2
        os.kill(children[0], signal.SIGKILL)
        wait_until(lambda: len(set(workers_of(process.pid)) - {children[0]}) == 2)
        wait_until(lambda: is_ready(url))
        complete(url)
        process.send_signal(signal.SIGTERM)
        code, said = end(process)
        assert code == 0
        assert said.startswith(f"WARNING: worker process {children[0]} has ended with exit code -9")
        assert said.count("\n") == 1
        assert not is_ready(url)


@pytest.mark.slow
def test_workers_that_cannot_start_end_the_command(bundle: Path, tmp_path: Path) -> None:
    options = ("--workers", "2", "--drafter", "none", "--lookup")
    with running(bundle, tmp_path / "log", *options) as (process, _):
        code, said = end(process)
    assert code == 2
    assert (
        said.splitlines()[-1]
        == "error: a worker process could not start, see above; serve with --workers 1"
    )


def test_ctrl_c_while_workers_start_is_quiet(bundle: Path, tmp_path: Path) -> None:
    with running(bundle, tmp_path / "log", "--workers", "2") as (process, _):
        wait_until(lambda: len(workers_of(process.pid)) == 2)
        os.killpg(process.pid, signal.SIGINT)
        assert end(process) == (0, "")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[processes.ServedBundles]:
    """Returns the list of what would have been served."""
    found: list[processes.ServedBundles] = []
    monkeypatch.setattr(processes, "serve", lambda bundles, *_: found.append(bundles))
    return found


def test_loopback_may_be_written_in_capitals(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, run: Run, served: list[processes.ServedBundles]
) -> None:
    bind = processes.bind
    monkeypatch.setattr(processes, "bind", lambda host, port: bind("127.0.0.1", port))
    code, _, error = run("serve", bundle, "--port", "0", "--host", "LocalHost")
    assert code == 0, error
    assert served[0].settings.hosts == settings.LOOPBACK


def test_bundles_are_named_and_have_aliases(
    bundle: Path, run: Run, served: list[processes.ServedBundles]
) -> None:
    options = ["--model-alias", "gpt-4o", "--context", "32", "--port", "0"]
    code, _, error = run("serve", "--bundle", bundle, *options)
    assert code == 0, error
    options = ["--model-alias", "gpt-4o=b", "--max-loaded", "1", "--port", "0"]
    code, _, error = run("serve", bundle, "--bundle", f"b={bundle}", *options)
    assert code == 0, error
    one, two = served
    assert [(each.name, each.aliases) for each in one.bundles] == [("tiny", ("gpt-4o",))]
    assert (one.bundles[0].max_length, one.most_open) == (32, None)
    assert [(each.name, each.aliases) for each in two.bundles] == [("tiny", ()), ("b", ("gpt-4o",))]
    assert (two.bundles[1].arguments["path"], two.most_open) == (str(bundle), 1)
    assert "none" in two.bundles[1].drafters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bundle", "{bundle}"], "got 2 bundles with the name tiny, expected one"),
        (["--bundle", "b={bundle}", "--name", "x"], "got --name x with 2 bundles, expected one"),
        (["--bundle", "b={bundle}", "--model-alias", "y"], "got --model-alias y, expected ALIAS="),
        (["--model-alias", "tiny"], "got --model-alias tiny, expected ALIAS=NAME with a new alias"),
        (["--bundle", "b=/no/such"], "/no/such: "),
        (["--api-key-env", "NO_SUCH_VARIABLE_HERE"], "got --api-key-env NO_SUCH_VARIABLE_HERE"),
        (["--timeout", "0"], "got timeout 0.0, expected more than 0"),
        (["--drafter", "hydra"], "got drafter 'hydra', expected one of"),
        (["--host", "192.168..1"], "got --host 192.168..1, expected an address or a name"),
        (["--grace", "inf"], "got grace inf, expected a finite float"),
        (["--host", "no.such.host.invalid"], "got --host no.such.host.invalid"),
        (["--workers", "0"], "Invalid value for '--workers'"),
        (["--max-prompt", "0"], "got max_prompt 0, expected 1 or more or None"),
        (["--port", "{taken}"], "--port {taken}, expected an address that is free here"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    bundle: Path, run: Run, options: list[str], message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        options = [option.format(bundle=bundle, taken=port) for option in options]
        code, _, error = run("serve", bundle, "--port", "0", *options)
    assert code == 2
    assert message.format(taken=port) in error
    assert error.count("\n") == 1


def test_conversations_in_turn_are_kept_for_both(bundle: Path) -> None:
    talks = [[{"role": "user", "content": letter * 40}] for letter in "ab"]
    cached: list[list[int]] = [[], []]
    asked = []
    engine = spec_runtime.load(bundle, kept_mb=1, profile=False)
    with in_process(engine, parallel=1) as client:
        for _ in range(2):
            for number, talk in enumerate(talks):
                body = {"messages": talk, "max_tokens": 4, "temperature": 0}
                reply = client.post(CHAT, json=body).json()
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


def workers_of(parent: int, word: bytes = b"spawn_main") -> list[int]:
    """Returns the processes of a parent that run an engine, or that have another word in their
    commands, by Linux's /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has just ended
        state, its_parent = status.rpartition(")")[2].split()[:2]
        if int(its_parent) == parent and state != "Z" and word in command:
            found.append(int(folder.name))
    return found


def test_the_manifest_for_kubernetes_has_options_and_addresses_that_exist(run: Run) -> None:
    yaml = pytest.importorskip("yaml")
    text = (Path(__file__).parents[1] / "examples/kubernetes.yaml").read_text()
    deployment, service, scaler = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][:2] == ["spec-runtime", "serve"]
    _, _, error = run(*container["command"][1:], *container["args"])
    assert error.startswith("error: /bundle: "), "the options are right, only the bundle is missing"
    paths = {getattr(route, "path", "") for route in app.router.routes}
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
    assert f"{name} 0.0" in Metrics().scrape().decode()
