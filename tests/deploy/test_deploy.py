"""The image's recipe and the example for Kubernetes, by their linters and against what the code offers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from disagg.commands.rank import command
from disagg.commands.rank.rank import RankConfig, ResidentRank
from disagg.integrations.options import Options
from disagg.runtime.metrics_server import MetricsServer

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "deploy/kubernetes.yaml"
VLLM = ROOT / "deploy/kubernetes-vllm.yaml"
POD_IP = "10.0.0.7"


def objects(kind: str) -> dict[str, dict[str, Any]]:
    documents = [each for each in yaml.safe_load_all(MANIFEST.read_text()) if each is not None]
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


def workload(role: str) -> dict[str, Any]:
    return (objects("StatefulSet") | objects("Deployment"))[role]


def container(role: str) -> dict[str, Any]:
    (found,) = workload(role)["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def lint(text: str) -> list[str]:
    program = Path(sys.executable).with_name("hadolint")
    ended = subprocess.run([str(program), "-"], input=text, capture_output=True, text=True, timeout=60, check=False)
    return (ended.stdout + ended.stderr).splitlines()


def test_the_dockerfile_has_no_findings() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text()
    assert lint(text) == []
    assert lint(text.replace("WORKDIR /source", "WORKDIR source"))


def test_the_image_has_every_file_that_the_build_reads() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text()
    copied = {word for line in re.findall("^COPY (?!--from)(.*)", text, re.MULTILINE) for word in line.split()[:-1]}
    admitted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == admitted
    assert {"CMakeLists.txt", "csrc", "disagg", "pyproject.toml", "LICENSE"} <= copied
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize("version", ["1.28", "1.34"])
def test_kubernetes_accepts_every_object(version: str) -> None:
    for each in (*yaml.safe_load_all(MANIFEST.read_text()), *yaml.safe_load_all(VLLM.read_text())):
        kubernetes_validate.validate(each, version, strict=True)
    broken = workload("prefill")
    broken["spec"]["replica"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, RankConfig]:
    """The configuration of each role, as its command reads it in a pod."""
    found: dict[str, RankConfig] = {}

    def keep(ranks: tuple[RankConfig, ...], **_: Any) -> None:
        found[ranks[0].role] = ranks[0]

    monkeypatch.setattr(command, "serve_until_stopped", keep)
    from disagg.commands.shell.group import disagg

    for role in ("prefill", "decode"):
        ended = CliRunner().invoke(disagg, ["keygen", "--out", str(tmp_path), "--name", role])
        assert ended.exit_code == 0, ended.output
    for role in ("prefill", "decode"):
        arguments = [
            each.replace("$(POD_IP)", POD_IP).replace("$(POD_NAME)", f"{role}-0").replace("/etc/disagg/keys", str(tmp_path))
            for each in container(role)["args"]
        ]
        ended = CliRunner().invoke(disagg, arguments)
        assert ended.exit_code == 0, ended.output
    return found


def test_decode_lists_every_pod_of_prefill(configs: dict[str, RankConfig]) -> None:
    """A StatefulSet `prefill` has pods `prefill-0`, `prefill-1`, ..., which its Service names `prefill-0.prefill`, ..."""
    pods, service = objects("StatefulSet")["prefill"]["spec"], objects("Service")["prefill"]["spec"]
    assert pods["serviceName"] == "prefill"
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"]
    assert service["selector"].items() <= pods["template"]["metadata"]["labels"].items()
    names = [f"prefill-{number}" for number in range(pods["replicas"])]
    assert configs["decode"].peers == {name: f"tcp://{name}.prefill:7100" for name in names}
    assert (configs["prefill"].name, configs["prefill"].advertise) == (names[0], configs["decode"].peers[names[0]])


def test_ranks_of_two_pods_connect_by_the_keys_of_their_sides(configs: dict[str, RankConfig]) -> None:
    here: dict[str, Any] = {
        "listen": "tcp://127.0.0.1:0",
        "advertise": None,
        "metrics_port": None,
        "num_layers": 1,
        "num_pages": 2,
    }
    prefill, decode = (replace(configs[role], **here) for role in ("prefill", "decode"))
    with ResidentRank(prefill) as one:
        peers = {prefill.name: one.manager.address}
        keys = {prefill.name: decode.peer_keys[prefill.name]}
        for name in ("decode-10.0.0.7", "decode-10.0.0.8"):
            with ResidentRank(replace(decode, name=name, peers=peers, peer_keys=keys)) as other:
                other.manager.wait_ready(prefill.name, timeout_s=60)
                one.manager.wait_ready(name, timeout_s=60)


def test_probes_and_ports_are_those_of_the_rank(configs: dict[str, RankConfig]) -> None:
    server = MetricsServer(CollectorRegistry(), lambda: "", lambda: "", host="127.0.0.1", port=0)
    for role, config in configs.items():
        spec = container(role)
        ports = {port["name"]: port["containerPort"] for port in spec["ports"]}
        assert ports == {"control": 7100, "metrics": config.metrics_port}
        assert config.metrics_host == "0.0.0.0"
        assert config.listen == f"tcp://0.0.0.0:{ports['control']}"
        for probe in ("readinessProbe", "livenessProbe"):
            assert spec[probe]["httpGet"]["port"] == "metrics"
            assert spec[probe]["httpGet"]["path"] == {"readinessProbe": "/readyz", "livenessProbe": "/healthz"}[probe]
            path = server.url.removesuffix("/metrics") + spec[probe]["httpGet"]["path"]
            with urllib.request.urlopen(path, timeout=30) as answer:
                assert answer.read() == b"ok\n"
    server.close()


def test_keys_and_shared_memory_are_mounted() -> None:
    for role in ("prefill", "decode"):
        volumes = {volume["name"]: volume for volume in workload(role)["spec"]["template"]["spec"]["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container(role)["volumeMounts"]}
        assert volumes.keys() == mounts.keys()
        used = [word for each in container(role)["args"] for word in re.findall(r"/etc/[\w/]+", each)]
        assert used
        assert all(path.startswith(mounts["keys"]) for path in used)
        assert mounts["shm"] == "/dev/shm"


def test_the_proxy_drains_every_decode_pod_of_vllm() -> None:
    """It lists the pods as their hooks name them, and the connector accepts the settings of each server."""
    described = list(yaml.safe_load_all(VLLM.read_text()))
    found = {each["metadata"]["name"]: each["spec"] for each in described if each["kind"] != "Service"}
    services = {each["metadata"]["name"]: each["spec"] for each in described if each["kind"] == "Service"}
    containers = {name: spec["template"]["spec"]["containers"][0] for name, spec in found.items()}
    for name in ("vllm-prefill", "vllm-decode"):
        assert found[name]["serviceName"] == name
        given = json.loads(containers[name]["args"][1].replace("$(POD_NAME)", f"{name}-0"))
        options = Options.read(given["kv_connector_extra_config"], engine_id=name)
        assert options.advertise == f"tcp://{name}-0.{name}:7100"
    urls = [f"http://vllm-decode-{number}.vllm-decode:8000" for number in range(found["vllm-decode"]["replicas"])]
    arguments = containers["pd-proxy"]["args"]
    assert "--move" in arguments
    assert [each for each in arguments if each.startswith("--decode=")] == [f"--decode={url}" for url in urls]
    for hook, path in (("preStop", "/admin/drain"), ("postStart", "/admin/undrain")):
        command = containers["vllm-decode"]["lifecycle"][hook]["exec"]["command"][-1]
        body = (
            command[command.index('-d "') + 4 : command.rindex('"')].replace('\\"', '"').replace("$POD_NAME", "vllm-decode-0")
        )
        (host,) = re.findall(rf"http://([a-z-]+):8000{path}", command)
        assert services[host]["selector"] == {"app": "vllm", "role": "proxy"}
        assert services[host]["publishNotReadyAddresses"]  # a proxy whose servers are all drained is not ready
        assert json.loads(body) == {"server": urls[0]}
