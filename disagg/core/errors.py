"""Every error that `disagg` raises.

```
DisaggError
├── ConfigError (ValueError)
├── LayoutError (ValueError)
├── ProtocolError
│   ├── LocalProtocolError
│   └── RemoteProtocolError
├── BackendError
│   ├── BackendUnavailable (ImportError)
│   ├── NotRegistered
│   ├── PeerUnreachable
│   ├── TransferFailed
│   └── TransferUnsettled
├── RequestAborted
│   └── VerificationFailed
└── RequestTimeout (TimeoutError)
```

A transfer is *settled* when the engine will never touch either side's memory again.
"""

from __future__ import annotations

import enum


class Cause(enum.Enum):
    ABORTED = "aborted"
    PEER = "peer"
    PEER_LOST = "peer_lost"
    TRANSFER = "transfer"
    """A transfer could not start, failed, or may be unsettled."""
    INCOMPLETE = "incomplete"
    """A writer finished without sending everything that was needed."""
    VERIFICATION = "verification"
    DEADLINE = "deadline"
    INVALID = "invalid"
    ENDED = "ended"
    """The manager was closed, or one of its threads died."""
    OTHER = "other"


class DisaggError(Exception):
    """Base of every error of this library."""

    cause = Cause.OTHER


class ConfigError(DisaggError, ValueError):
    """A setting or an argument is wrong."""

    cause = Cause.INVALID


class LayoutError(DisaggError, ValueError):
    """Two layouts do not match, or rows do not fit a layout."""

    cause = Cause.INVALID


class ProtocolError(DisaggError):
    """One side broke the protocol."""


class LocalProtocolError(ProtocolError):
    """The caller requested a step that the protocol does not allow. Nothing has changed."""

    cause = Cause.INVALID


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol."""

    cause = Cause.PEER


class BackendError(DisaggError):
    """Base of errors of a transfer engine."""

    cause = Cause.TRANSFER


class BackendUnavailable(BackendError, ImportError):
    """The message names what is missing and the package that provides it."""


class NotRegistered(BackendError):
    """A copy uses memory outside every registered region. Nothing was posted."""


class PeerUnreachable(BackendError):
    """The peer cannot be reached, or was disconnected."""

    cause = Cause.PEER_LOST


class PeerIncompatible(PeerUnreachable):
    """Another release of the engine, or slots on one side only: neither side can reach the other until one restarts."""


class TransferFailed(BackendError):
    """A transfer failed and is settled."""


class TransferUnsettled(BackendError):
    """A transfer failed, and the engine may still touch the memory, which stays quarantined. Backends report it; the request
    ends in `RequestAborted`.
    """


class RequestAborted(DisaggError):
    """The request ended before its data was complete. The message gives the first cause, `cause` its kind."""

    def __init__(self, message: str, *, cause: Cause = Cause.ABORTED) -> None:
        super().__init__(message)
        self.cause = cause


class VerificationFailed(RequestAborted):
    """The checksums of the two sides differ. The message names the component, the layer and the page."""

    def __init__(self, message: str) -> None:
        super().__init__(message, cause=Cause.VERIFICATION)


class RequestTimeout(DisaggError, TimeoutError):
    """A deadline passed."""

    cause = Cause.DEADLINE
