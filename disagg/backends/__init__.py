"""How bytes move. A backend sees addresses and lengths only.

The author of a backend imports everything from this module: the contract, optional abilities, a base class, endpoints, and
the types and errors that they use. Engines themselves are imported when they are first used.
"""

from disagg.backends.abilities import (
    Gathering,
    PreparedSpans,
    ProvesByProcess,
    QuietWhenClosed,
    Renewable,
    SaysStaging,
    SpanWriter,
)
from disagg.backends.adapter import Adapter, AdapterPeer, check_closable
from disagg.backends.base import (
    Backend,
    BackendOptions,
    Fence,
    RemotePeer,
    StagingShape,
    Transfer,
    TransferStatus,
    Transport,
    check_rdma,
)
from disagg.backends.endpoint import Endpoint, RegionIndex, decode_endpoint, encode_endpoint
from disagg.core.copies import CopyBatch
from disagg.core.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    LocalProtocolError,
    NotRegistered,
    PeerIncompatible,
    PeerUnreachable,
    RemoteProtocolError,
)
from disagg.core.memory import CPU, Device, MemoryRegion, RemoteRegion, merge_regions
from disagg.core.spans import SpanBatch, SpanShape
from disagg.machine.processes import ProcessWatch

__all__ = [
    "CPU",
    "Adapter",
    "AdapterPeer",
    "Backend",
    "BackendError",
    "BackendOptions",
    "BackendUnavailable",
    "ConfigError",
    "CopyBatch",
    "Device",
    "Endpoint",
    "Fence",
    "Gathering",
    "LocalProtocolError",
    "MemoryRegion",
    "NotRegistered",
    "PeerIncompatible",
    "PeerUnreachable",
    "PreparedSpans",
    "ProcessWatch",
    "ProvesByProcess",
    "QuietWhenClosed",
    "RegionIndex",
    "RemotePeer",
    "RemoteProtocolError",
    "RemoteRegion",
    "Renewable",
    "SaysStaging",
    "SpanBatch",
    "SpanShape",
    "SpanWriter",
    "StagingShape",
    "Transfer",
    "TransferStatus",
    "Transport",
    "check_closable",
    "check_rdma",
    "decode_endpoint",
    "encode_endpoint",
    "merge_regions",
]
