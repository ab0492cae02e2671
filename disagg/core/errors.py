"""Every error that `disagg` raises.

```
DisaggError
├── ConfigError (ValueError)          a setting or an argument is wrong
├── LayoutError (ValueError)          two layouts do not match, or rows do not fit a layout
├── ProtocolError
│   ├── LocalProtocolError            the caller broke the protocol
│   └── RemoteProtocolError           the peer broke the protocol
├── BackendError
│   ├── BackendUnavailable (ImportError)  something that the engine needs is missing
│   ├── NotRegistered                 an address is outside every registered region
│   ├── PeerUnreachable               the peer cannot be reached, or was disconnected
│   ├── TransferFailed                a transfer failed and is settled
│   └── TransferUnsettled             a transfer failed and may not be settled
├── RequestAborted                    a request ended before its data was complete
│   └── VerificationFailed            the checksums of the two sides differ
└── RequestTimeout (TimeoutError)     a deadline passed
```

A message says what was expected, what was found, and where. A transfer is *settled* when the engine will never touch
either side's memory again.
"""

from __future__ import annotations

import enum


class Cause(enum.Enum):
    """Why a request failed, as a short label for metrics and logs. The error's message has the details."""

    ABORTED = "aborted"
    """This server aborted it."""
    PEER = "peer"
    """The peer aborted it."""
    PEER_LOST = "peer_lost"
    """The connection to the peer was lost."""
    TRANSFER = "transfer"
    """A transfer could not start, failed, or may be unsettled."""
    INCOMPLETE = "incomplete"
    """A writer finished without sending everything that was needed."""
    VERIFICATION = "verification"
    """The checksums of the two sides differ."""
    DEADLINE = "deadline"
    """A deadline passed."""
    INVALID = "invalid"
    """The caller gave invalid arguments."""
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
    """Base of protocol violations."""


class LocalProtocolError(ProtocolError):
    """The caller requested a step that the protocol does not allow. Nothing has changed."""

    cause = Cause.INVALID


class RemoteProtocolError(ProtocolError):
    """A peer sent something that the protocol does not allow."""

    cause = Cause.PEER


class BackendError(DisaggError):
    """Base of errors of a transfer engine."""

    cause = Cause.TRANSFER


class BackendUnavailable(BackendError, ImportError):
    """The engine cannot be used here. The message names what is missing and the package that provides it."""


class NotRegistered(BackendError):
    """A copy uses memory outside every registered region. Nothing was posted."""


class PeerUnreachable(BackendError):
    """The peer cannot be reached, or was disconnected."""

    cause = Cause.PEER_LOST


class TransferFailed(BackendError):
    """A transfer failed and is settled: the engine will never touch either side's memory again."""


class TransferUnsettled(BackendError):
    """A transfer failed, and the engine may still touch the memory. A backend reports it as the error of such a transfer.

    The rows stay quarantined. The request ends in `RequestAborted`.
    """


class RequestAborted(DisaggError):
    """The request ended before its data was complete. The message gives the first cause, and `cause` its kind."""

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
