"""A pytest plug-in: vLLM's own tests of connectors, with `DisaggConnector` in place of those that they name.

    $ cd VLLM && export PYTHONPATH=.:DISAGG U=tests/v1/kv_connector/unit
    $ python -m pytest -c /dev/null --rootdir . --confcutdir $U -p harness.vllm.in_place --in-place-of NixlConnector $U

`VLLM` is vLLM's repository, or its source distribution, of the installed version, and `DISAGG` is this repository. The tests
stay as they are, and get a model that is written here. An exception that a hook of the connector has caught fails its
test. At the end pytest prints in how many tests vLLM's scheduler has asked the connector: others replace it by their own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.vllm.engine import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # before vLLM is imported

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from disagg.integrations.vllm import DisaggConnector
from disagg.integrations.vllm.metadata import RankAddress
from harness.vllm.models import write_model

MODEL = "facebook/opt-125m"
"""The model that vLLM's tests name. A folder of this name comes before the model hub."""
NUM_ASKED = [0]
"""In how many tests vLLM's scheduler has asked the connector."""


class InPlace(DisaggConnector):
    """With what these tests leave to their connector: the options and parameters of this one, and a worker's address."""

    is_asked = False

    def __init__(self, config: VllmConfig, role: KVConnectorRole, caches: KVCacheConfig) -> None:
        assert config.kv_transfer_config is not None
        config.kv_transfer_config.kv_connector_extra_config.pop("shared_storage_path", None)
        super().__init__(config, role, caches)
        if role is KVConnectorRole.SCHEDULER:
            address = RankAddress(engine_id="here", address="tcp://127.0.0.1:1", public_key=None, is_alone=True)
            self.set_xfer_handshake_metadata_pp_aware({(0, 0): address})

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if params is not None and params.get("do_remote_prefill"):
            where = {"remote_engine_id": "there", "remote_address": "tcp://127.0.0.1:2"}
            transfer = hashlib.blake2b(request.request_id.encode(), digest_size=16).hexdigest()
            request.kv_transfer_params = {"do_remote_prefill": True, **where, "remote_request_id": transfer}
        super().on_new_request(request)

    def build_connector_meta(self, output: SchedulerOutput) -> KVConnectorMetadata:
        InPlace.is_asked = True
        return super().build_connector_meta(output)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--in-place-of", action="append", default=[], help="the name of a connector of vLLM, any number of times")


def pytest_configure(config: pytest.Config) -> None:
    for name in config.getoption("--in-place-of"):
        KVConnectorFactory._registry[name] = lambda: InPlace


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests find the model."""
    found = tmp_path_factory.mktemp("models")
    write_model("llama", found / MODEL)
    return found


@pytest.fixture(autouse=True)
def in_place(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.chdir(folder)
    InPlace.is_asked = False
    yield
    NUM_ASKED[0] += InPlace.is_asked
    logged = [each.getMessage() for each in caplog.get_records("call") if each.name.startswith("disagg") and each.exc_info]
    assert not logged


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"vLLM's scheduler has asked DisaggConnector in {NUM_ASKED[0]} of these tests")
