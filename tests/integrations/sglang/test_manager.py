"""What a manager keeps of the requests of many clients, and how often it looks at them."""

from __future__ import annotations

import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode

from disagg import ConfigError, LocalProtocolError
from disagg.integrations.sglang.bootstrap import BootstrapServers, Prefill, Served
from disagg.integrations.sglang.manager import DisaggKVManager
from disagg.integrations.sglang.rooms import Rooms

LIMIT = 1024


@pytest.fixture
def manager() -> Any:
    """One without connections."""
    found: Any = object.__new__(DisaggKVManager)
    found.disaggregation_mode = DisaggregationMode.DECODE
    found.transfers = SimpleNamespace(events=list)
    found.rooms, found.waiting, found.bootstrap = Rooms(), {}, BootstrapServers()
    found.prefill_info_table, found.addr_to_rooms_tracker = {}, defaultdict(set)
    found._served, found._misses, found._collect_at, found._watch_at = {}, {}, 0.0, 0.0
    found._located, found.storage = set(), None
    return found


def test_only_so_many_instances_are_remembered(manager: Any) -> None:
    """Those with requests are, however many others there are, and then those that were named last."""
    busy, often = "busy@h:1", "often@h:1"
    manager.addr_to_rooms_tracker[busy].add(7)
    for server in (busy, often, *(f"{number}@h:1" for number in range(2 * LIMIT))):
        assert manager.try_ensure_parallel_info(server)
        manager.check_prefill(often)
        assert server in manager.prefill_info_table
    assert len(manager.prefill_info_table) == LIMIT
    assert {busy, often} < manager.prefill_info_table.keys()


def test_a_server_is_asked_again_for_instances_that_are_in_use(manager: Any) -> None:
    """Not for those that this rank never meets, such as those of other data-parallel ranks."""
    states, server = {"used": "ready", "other": "unknown"}, "h:1"
    manager.transfers = SimpleNamespace(peer=lambda name: SimpleNamespace(state=states[name]))
    prefills = {rank: Prefill(name, f"tcp://{name}", 0) for rank, name in enumerate(states)}
    manager._served[server] = Served(SimpleNamespace(kv_cache_dtype=None), prefills, asked_s=0.0)
    manager.prefill_info_table[server] = object()
    assert manager.locate(SimpleNamespace(bootstrap_addr=server, prefill_dp_rank=0)).name == "used"
    manager.check_prefill(server)
    assert server in manager.prefill_info_table
    states["used"] = "connecting"
    manager.check_prefill(server)
    assert server not in manager.prefill_info_table


@pytest.mark.parametrize("host", ["x" * 301, "", 5])
def test_the_name_of_a_host_is_bounded(manager: Any, host: Any) -> None:
    request = SimpleNamespace(bootstrap_room=7, bootstrap_host="x" * 300, bootstrap_port=8998)
    manager.check_request(request)
    request.bootstrap_host = host
    with pytest.raises(LocalProtocolError, match="bootstrap_host: expected a host of at most 300 characters and a port"):
        manager.check_request(request)


@pytest.mark.parametrize("storage", [None, "--hicache-storage-backend"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "fp8_e4m3"])
def test_servers_of_two_dtypes_share_no_storage(manager: Any, storage: str | None, dtype: str | None) -> None:
    """Keys of stored pages do not say which dtype these have."""
    prefill = Prefill("prefill", "tcp://h:1", 0)
    manager._served["h:2"] = Served(SimpleNamespace(kv_cache_dtype=dtype), {0: prefill}, asked_s=0.0)
    manager.storage, manager.kv_cache_dtype_str = storage, "fp8_e4m3"
    if storage is not None and dtype == "bfloat16":
        with pytest.raises(ConfigError, match="expected bfloat16 as at h:2, found fp8_e4m3: with --hicache-storage-backend"):
            manager.check_dtype("h:2")
    else:
        manager.check_dtype("h:2")


def test_many_waiting_senders_leave_the_scheduler_most_of_its_time(manager: Any) -> None:
    """It polls each of them in a step, and each poll may look at all of them."""
    looks = []

    def look() -> None:
        looks.append(time.monotonic())
        time.sleep(0.0001)

    manager.waiting = {room: SimpleNamespace(look=look) for room in range(50)}
    begun_s = time.monotonic()
    manager.collect()
    took_s = time.monotonic() - begun_s
    while time.monotonic() < begun_s + 5 * took_s:
        manager.collect()
    assert len(looks) == 50
    while len(looks) == 50:
        manager.collect()
        assert time.monotonic() < begun_s + 30 * took_s


def test_a_scheduler_that_was_stopped_while_it_looked_soon_looks_again(manager: Any) -> None:
    """On a busy machine it stood for seconds, and the bytes that had arrived meanwhile waited ten times as long."""
    manager.waiting = {7: SimpleNamespace(look=lambda: time.sleep(0.5))}
    manager.collect()
    assert manager._collect_at <= time.monotonic() + 0.1
