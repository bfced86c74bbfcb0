"""Several models on the lmi engine in one server process, as a user starts it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from tests.checkpoints import cached_checkpoint

pytestmark = pytest.mark.timeout(180)


@dataclass
class Server:
    url: str
    pid: int
    log: IO[str]

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def generate(self, name: str, num_tokens: int = 8) -> str:
        body = {"inputs": "hello", "parameters": {"max_new_tokens": num_tokens}}
        status, answer = self.ask("POST", f"/predictions/{name}", body)
        assert status == 200, answer
        text: str = answer["generated_text"]
        return text

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096


@contextmanager
def serving(*args: str, exit_code: int = 0) -> Iterator[Server]:
    """A server that ends cleanly on SIGTERM, or with ``exit_code`` by itself."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lmi_core", "serve", *args, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            match = re.fullmatch(r"Listening on (http://127\.0\.0\.1:\d+)\n", first)
            assert match, first
            yield Server(match[1], process.pid, log)
            if not exit_code:
                process.terminate()
            process.communicate(timeout=30)
            assert process.returncode == exit_code
            log.seek(0)
            assert "Traceback" not in log.read()
        finally:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model store of two models with different weights."""
    store = tmp_path_factory.mktemp("store")
    for name, seed in (("a", 0), ("b", 1)):
        shutil.copytree(cached_checkpoint("llama2", seed=seed), store / name)
    (store / "a" / "serving.properties").write_text("job_queue_size=5\n")
    return store


@pytest.fixture(scope="module")
def alone(store: Path) -> dict[str, str]:
    """What each model says in a server of its own."""
    texts = {}
    for name in ("a", "b"):
        with serving(str(store / name)) as server:
            texts[name] = server.generate(name)
    assert texts["a"] != texts["b"]
    return texts


def test_a_store_is_served_with_each_models_own_configuration(
    store: Path, alone: dict[str, str]
) -> None:
    with serving("--model-store", str(store)) as server:
        assert {name: server.generate(name) for name in alone} == alone
        _, described = server.ask("GET", "/models/a")
        assert described[0]["models"][0]["queueSize"] == 5
        _, described = server.ask("GET", "/models/b")
        assert described[0]["models"][0]["queueSize"] == 1000
        assert described[0]["models"][0]["modelUrl"] == f"file://{store}/b/"
        body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "model": "b"}
        _, completion = server.ask("POST", "/v1/completions", body)
        assert completion["choices"][0]["text"] == alone["b"]
        _, completion = server.ask("POST", "/tgi/v1/completions?model_name=a", body)
        assert completion["choices"][0]["text"] == alone["a"]
        assert server.ask("GET", "/info")[0] == 200
        server.log.seek(0)
        log = server.log.read()
        assert "model b: weights" in log
        assert "shared by 2 models" in log or "sequences of" in log
        assert "steps of all models run one after the other" in log


def test_models_come_and_go_under_load(store: Path, alone: dict[str, str]) -> None:
    """Neither tokens nor requests of the one that stays are lost, and memory is returned."""
    with serving(str(store / "a"), "--option", f"model_store={store}") as server:
        stop, texts, failures = threading.Event(), [], []

        def load() -> None:
            while not stop.is_set():
                try:
                    texts.append(server.generate("a"))
                except Exception as error:
                    failures.append(error)
                    return

        clients = [threading.Thread(target=load) for _ in range(2)]
        for client in clients:
            client.start()
        resident = []
        for _ in range(6):
            status, answer = server.ask("POST", f"/models?url={store}/b")
            assert (status, answer) == (200, {"status": 'Model "b" registered.'})
            assert server.generate("b") == alone["b"]
            status, answer = server.ask("DELETE", "/models/b")
            assert (status, answer) == (200, {"status": 'Model or workflow "b" unregistered'})
            resident.append(server.resident_bytes)
        stop.set()
        for client in clients:
            client.join()
        assert not failures
        assert set(texts) == {alone["a"]}
        assert len(texts) > 10
        assert resident[-1] - resident[1] < 8 << 20, resident
        with urllib.request.urlopen(server.url + "/metrics", timeout=60) as response:
            metrics = response.read().decode()
        assert 'lmi_kv_blocks{model_name="a",state="used"} 0.0' in metrics
        assert 'model_name="b"' not in metrics


def test_a_server_may_start_empty(store: Path, alone: dict[str, str]) -> None:
    with serving("--option", "load_models=NONE", "--option", f"model_store={store}") as server:
        assert server.ask("GET", "/ping") == (200, {})
        status, answer = server.ask("POST", "/models", {"model_name": "x", "url": f"{store}/a"})
        assert (status, answer) == (200, {"status": 'Model "x" registered.'})
        assert server.generate("x") == alone["a"]
        status, answer = server.ask(
            "POST", "/models", {"model_name": "y", "url": f"{store}/a", "max_idle_time": "never"}
        )
        assert (status, answer["type"]) == (400, "ModelException")
        assert "max_idle_time" in answer["message"]


HANDLER = """
from djl_python import Output

def handle(inputs):
    if inputs.is_empty():
        return None
    return Output().add_as_json({"echo": inputs.get_as_json()["inputs"]})
"""


def test_a_models_own_code_comes_beside_an_engine(
    store: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "echo").mkdir()
    (tmp_path / "echo" / "model.py").write_text(HANDLER)
    register = f"/models?url={tmp_path}/echo&min_worker=2&max_worker=2"
    arguments = (str(store / "a"), "--option", f"model_store={tmp_path}")
    with serving(*arguments) as server:
        status, answer = server.ask("POST", register)
        assert (status, answer["type"]) == (403, "ForbiddenException")
        assert "--allow-custom-code" in answer["message"]
    with serving(*arguments, "--allow-custom-code") as server:
        assert server.ask("POST", register) == (200, {"status": 'Model "echo" registered.'})
        body = {"inputs": "hi"}
        assert server.ask("POST", "/models/echo/invoke", body) == (200, {"echo": "hi"})
        assert server.generate("a") == alone["a"]
        _, described = server.ask("GET", "/models/echo")
        (group,) = described[0]["models"][0]["workerGroups"]
        assert (group["minWorkers"], group["maxWorkers"], len(group["workers"])) == (2, 2, 2)
        for workers in (0, 2):
            query = f"min_worker={workers}&max_worker={workers}"
            assert server.ask("PUT", f"/models/echo?{query}")[0] == 200
        assert server.ask("POST", "/predictions/echo", body) == (200, {"echo": "hi"})
        assert server.ask("GET", "/ping")[1]["echo"] == {"status": "Healthy"}
        assert server.ask("DELETE", "/models/echo")[0] == 200
        assert server.ask("POST", "/predictions/echo", body)[0] == 404


def test_port_may_open_before_models_are_loaded(store: Path, tmp_path: Path) -> None:
    """A model that can't be loaded shows as failed for a moment, then the server ends."""
    broken = tmp_path / "broken"
    shutil.copytree(store / "b", broken)
    for weights in broken.glob("*.safetensors"):
        weights.write_bytes(b"not weights")
    arguments = (str(store / "a"), str(broken), "--option", "wait_model_loading=false")
    with serving(*arguments, exit_code=2) as server:
        states: dict[str, Any] = {}
        while states.get("broken") != {"status": "FAILED"}:
            status, states = server.ask("GET", "/ping")
            assert states["a"] in ({"status": "PENDING"}, {"status": "Healthy"})
        assert status == 500
        assert states["a"] == {"status": "Healthy"}
