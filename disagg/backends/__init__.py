"""How bytes move. A backend sees addresses and lengths only.

This module has everything that the author of a backend needs: the contract, optional abilities, endpoints, and the few
types and errors that they are made of. Each engine is imported when it is first asked for.
"""

from disagg.backends.abilities import Gathering, PreparedSpans, QuietWhenClosed, SaysStaging, SpanWriter
from disagg.backends.base import (
    Backend,
    BackendOptions,
    Fence,
    Op,
    RemotePeer,
    StagingShape,
    Transfer,
    TransferStatus,
    Transport,
    check_rdma,
)
from disagg.backends.endpoint import Endpoint, RegionIndex, decode_endpoint, encode_endpoint, local_and_remote
from disagg.core.copies import CopyBatch
from disagg.core.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    LocalProtocolError,
    NotRegistered,
    PeerUnreachable,
    RemoteProtocolError,
)
from disagg.core.memory import CPU, Device, MemoryRegion, RemoteRegion, merge_regions

__all__ = [
    "CPU",
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
    "Op",
    "PeerUnreachable",
    "PreparedSpans",
    "QuietWhenClosed",
    "RegionIndex",
    "RemotePeer",
    "RemoteProtocolError",
    "RemoteRegion",
    "SaysStaging",
    "SpanWriter",
    "StagingShape",
    "Transfer",
    "TransferStatus",
    "Transport",
    "check_rdma",
    "decode_endpoint",
    "encode_endpoint",
    "local_and_remote",
    "merge_regions",
]
