"""What images, services and clusters start: entry points and probes as processes, files as data."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmi_core.cli import DEMO_MODEL
from lmi_core.config.resolve import examine
from lmi_core.config.targets.host import Host
from tests.cli.test_native import post
from tests.ports import reserved_port

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "server" / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
LAUNCHER = "import sys; from lmi_core.cli import launcher; sys.exit(launcher())"


@contextmanager
def started(*command: str, **environ: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        match = re.match(r"Listening on (http://127\.0\.0\.1:\d+)", process.stdout.readline())
        assert match
        yield match[1], process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def image_environ(port: int) -> dict[str, str]:
    """What the image's ENV says, but on another port."""
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    pairs = dict(part.split("=", 1) for part in block.replace("\\\n", " ").split())
    address = pairs["SERVING_INFERENCE_ADDRESS"]
    return pairs | {"SERVING_INFERENCE_ADDRESS": address.replace(":8080", f":{port}")}


@pytest.mark.parametrize(
    ("arguments", "route"),
    [
        (["serve"], "/invocations"),
        (["djl-serving"], "/invocations"),
        (["--model-id", str(DEMO_MODEL)], "/generate"),
        (["text-generation-launcher", "--model-id", str(DEMO_MODEL)], "/generate"),
    ],
)
def test_the_images_entry_points(arguments: list[str], route: str, port: int) -> None:
    """As ``docker run IMAGE ARGUMENTS``, on a file system on which nothing can be written."""
    environ = image_environ(port) | {"XDG_CACHE_HOME": "/proc/none", "HF_HOME": "/proc/none"}
    with started("-m", "lmi_core", *arguments, **environ) as (url, process):
        with urllib.request.urlopen(f"{url}/ping", timeout=60) as response:
            assert response.status == 200
        body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 3}}
        status, answer = post(f"{url}{route}", body)
        assert (status, "generated_text" in answer) == (200, True), answer
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def test_sagemaker_names_the_port(port: int) -> None:
    with started("-m", "lmi_core", "serve", SAGEMAKER_BIND_TO_PORT=str(port)) as (url, _):
        assert url.endswith(f":{port}")


def test_the_launcher_serves_its_own_protocol_without_a_model_named() -> None:
    with started("-c", LAUNCHER, "--port", "0") as (url, _):
        status, answer = post(f"{url}/", {"inputs": "x", "parameters": {"max_new_tokens": 1}})
        assert (status, "generated_text" in json.loads(answer)[0]) == (200, True)


def test_a_supervisor_is_told_of_readiness_and_of_the_end(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(30)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with started("-m", "lmi_core", "serve", "--port", "0", **environ) as (url, process):
            assert supervisor.recv(100) == b"READY=1"
            with urllib.request.urlopen(f"{url}/ping", timeout=60) as response:
                assert response.status == 200
            process.send_signal(signal.SIGTERM)
            assert supervisor.recv(100) == b"STOPPING=1"
            assert process.wait(timeout=30) == 0


def test_the_health_check_is_a_program_that_works() -> None:
    match = re.search(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert match
    python, *arguments = json.loads(match[1])
    assert python == "python"
    with started("-m", "lmi_core", "serve", "--port", "0") as (url, _):
        here = [argument.replace("http://127.0.0.1:8080", url) for argument in arguments]
        assert subprocess.run([sys.executable, *here], timeout=30).returncode == 0
    gone = subprocess.run([sys.executable, *here], timeout=30, capture_output=True)
    assert gone.returncode != 0


def test_the_image_has_what_its_build_needs() -> None:
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in kept if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"\$\{wheel\}\[([\w,]+)\]", DOCKERFILE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert "USER lmi" in DOCKERFILE


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_what_images_and_sdists_have_can_be_configured(tmp_path: Path) -> None:
    """setuptools adds what it takes for tests to an sdist by itself; an image has less."""
    pytest.importorskip("setuptools")
    checkout, ignored = tmp_path / "checkout", shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("csrc", "lmi_core", "server"):
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    (checkout / "tests").mkdir()
    for path in [*ROOT.glob("*.*"), *ROOT.glob("tests/*.py"), ROOT / "LICENSE"]:
        if path.is_file():
            shutil.copy(path, checkout / path.relative_to(ROOT))
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", "dist"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (sdist,) = (checkout / "dist").iterdir()
    subprocess.run(["tar", "-xzf", sdist, "-C", tmp_path], check=True)
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert (source / "server" / "http" / "ui.html").exists()
    configure = ["cmake", "-S", source, "-B", tmp_path / "build", "-DLMI_PYTHON=OFF"]
    done = subprocess.run(configure, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_probes_ask_for_routes_that_there_are() -> None:
    (deployment,) = (each for each in MANIFESTS if each["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    routes = (ROOT / "server" / "ROUTES.md").read_text()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[probe]["httpGet"]
        assert get["path"] in routes
        assert ports[get["port"]] == 8080
    drain = int(container["args"][container["args"].index("--drain-timeout") + 1])
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drain + 10
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_manifests_belong_together() -> None:
    kinds = {each["kind"]: each for each in MANIFESTS}
    assert set(kinds) == {"Service", "Deployment", "HorizontalPodAutoscaler"}
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"] == labels
    scaled = kinds["HorizontalPodAutoscaler"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == kinds["Deployment"]["metadata"]["name"]
    (metric,) = scaled["metrics"]
    name = metric["pods"]["metric"]["name"]
    with (
        started("-m", "lmi_core", "serve", "--port", "0") as (url, _),
        urllib.request.urlopen(f"{url}/metrics", timeout=60) as response,
    ):
        assert f"\n{name}{{" in response.read().decode()


def test_compose_and_the_unit_start_the_same_command() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = compose["services"]["lmi"]
    assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    assert service["command"] == ["serve"]
    unit = (DEPLOY / "lmi.service").read_text()
    assert "Type=notify" in unit
    assert re.search(r"^ExecStart=\S+/lmi serve", unit, re.MULTILINE)


def test_the_cluster_of_ray_and_its_fronts_belong_together() -> None:
    kinds = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "ray.yaml").read_text())}
    cluster, front = kinds["RayCluster"], kinds["Deployment"]["spec"]["template"]
    assert kinds["Service"]["spec"]["selector"] == front["metadata"]["labels"]
    (container,) = front["spec"]["containers"]
    joining, serving = container["args"][0].split(" && ")
    assert f"--address={cluster['metadata']['name']}-head-svc:6379" in joining
    _, command, *argv = serving.removeprefix("exec ").split()
    assert command == "serve"
    report = examine([str(DEMO_MODEL), *argv], {}, Host())
    assert not report.problems
    (model,) = report.models
    (copies,) = cluster["spec"]["workerGroupSpecs"]
    assert (model.is_on_ray, model.placement.most_copies) == (True, 4)
    assert copies["rayStartParams"]["num-cpus"] == str(model.get("option.num_threads"))
    head = cluster["spec"]["headGroupSpec"]
    pods = [front, head["template"], copies["template"]]
    (image,) = {pod["spec"]["containers"][0]["image"] for pod in pods}
    dockerfile = (DEPLOY / "ray.Dockerfile").read_text()
    assert f"-t {image} " in dockerfile
    assert f"FROM rayproject/ray:{cluster['spec']['rayVersion']}-" in dockerfile
    paths = [pod["spec"]["containers"][0].get("volumeMounts") for pod in (front, pods[2])]
    assert paths[0] == paths[1]
