"""Moves LLM inference state between prefill and decode workers that lay it out differently.

    manager = KVManager(name="decode-0", topology=topology, components=[kv], model=ModelId("llama-3-8b"), backend="nixl")
    manager.add_peer("prefill-0", address="tcp://10.0.0.1:7000")

Importing this package starts nothing and needs no engine. State kinds are in `disagg.state`, engines in
`disagg.backends`, what tests of an embedding need in `disagg.testing`.
"""

from disagg.config import Config
from disagg.core.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    DisaggError,
    LayoutError,
    LocalProtocolError,
    NotRegistered,
    PeerUnreachable,
    ProtocolError,
    RemoteProtocolError,
    RequestAborted,
    RequestTimeout,
    TransferFailed,
    TransferUnsettled,
    VerificationFailed,
)
from disagg.core.events import ReadyEvent
from disagg.core.leases import Lease, LeaseState
from disagg.core.memory import Device, MemoryRegion, RawTensor
from disagg.core.rows import Pages, Slot
from disagg.core.timeline import Timeline
from disagg.core.topology import Topology
from disagg.layout.agreement import ModelId
from disagg.layout.placement import Component
from disagg.manager import KVManager, new_request_id
from disagg.protocol.peer_effects import ConnectionLimits
from disagg.protocol.types import Event, Limits, RequestKey
from disagg.requests import Receiver, Sender, combine
from disagg.runtime.accounting import Stats
from disagg.runtime.directory import PeerStatus
from disagg.runtime.health import Health
from disagg.runtime.keys import KeyPair
from disagg.state.align import align_state_indices, group_concurrent_contiguous

__all__ = [
    "BackendError",
    "BackendUnavailable",
    "Component",
    "Config",
    "ConfigError",
    "ConnectionLimits",
    "Device",
    "DisaggError",
    "Event",
    "Health",
    "KVManager",
    "KeyPair",
    "LayoutError",
    "Lease",
    "LeaseState",
    "Limits",
    "LocalProtocolError",
    "MemoryRegion",
    "ModelId",
    "NotRegistered",
    "Pages",
    "PeerStatus",
    "PeerUnreachable",
    "ProtocolError",
    "RawTensor",
    "ReadyEvent",
    "Receiver",
    "RemoteProtocolError",
    "RequestAborted",
    "RequestKey",
    "RequestTimeout",
    "Sender",
    "Slot",
    "Stats",
    "Timeline",
    "Topology",
    "TransferFailed",
    "TransferUnsettled",
    "VerificationFailed",
    "__version__",
    "align_state_indices",
    "combine",
    "group_concurrent_contiguous",
    "new_request_id",
]

__version__ = "0.1.0"
