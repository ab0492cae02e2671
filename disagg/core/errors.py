"""Every error that `disagg` raises.

```
DisaggError
├── ConfigError (ValueError)          a setting is wrong: names the setting, what was expected, what was found
├── LayoutError (ValueError)          two layouts cannot be matched: names the axis and both values
├── ProtocolError
│   ├── LocalProtocolError            the caller broke the protocol
│   └── RemoteProtocolError           the peer broke it
├── BackendError
│   ├── BackendUnavailable (ImportError)  names what is missing and the package that brings it
│   ├── NotRegistered                 an address outside every registered region
│   ├── PeerUnreachable
│   ├── TransferFailed                settled: the engine will touch neither side again
│   └── TransferUnsettled             the engine cannot tell: the rows are quarantined
├── RequestAborted
│   └── VerificationFailed            the sums of the two sides differ: names component, layer and page
└── RequestTimeout (TimeoutError)
```
"""

from __future__ import annotations

import enum


class Cause(enum.Enum):
    """Why a request failed, as a word that metrics and logs can count; an error's message says it in full."""

    ABORTED = "aborted"
    """The server here ended it."""
    PEER = "peer"
    """The peer ended it, for a reason of its own."""
    PEER_LOST = "peer_lost"
    TRANSFER = "transfer"
    """Copies could not be made, failed, or may still go on."""
    INCOMPLETE = "incomplete"
    """A writer finished without all that was needed."""
    VERIFICATION = "verification"
    """What arrived is not what was sent."""
    DEADLINE = "deadline"
    INVALID = "invalid"
    """The caller asked for what cannot be."""
    ENDED = "ended"
    """The manager was closed, or a thread of it died."""
    OTHER = "other"


class DisaggError(Exception):
    """Base of every error of this library."""

    cause = Cause.OTHER


class ConfigError(DisaggError, ValueError):
    """A setting or an argument is wrong."""

    cause = Cause.INVALID


class LayoutError(DisaggError, ValueError):
    """Two layouts cannot be matched, or rows do not fit a layout."""

    cause = Cause.INVALID


class ProtocolError(DisaggError):
    """Base of protocol violations."""


class LocalProtocolError(ProtocolError):
    """The caller asked for a step that the protocol does not allow; nothing has changed."""

    cause = Cause.INVALID


class RemoteProtocolError(ProtocolError):
    """A peer sent something that the protocol does not allow."""

    cause = Cause.PEER


class BackendError(DisaggError):
    """Base of what a transfer engine reports."""

    cause = Cause.TRANSFER


class BackendUnavailable(BackendError, ImportError):
    """The engine cannot be used here; the message names what is missing and the package that brings it."""


class NotRegistered(BackendError):
    """A copy names memory outside every registered region; nothing was posted."""


class PeerUnreachable(BackendError):
    """The peer cannot be reached, or was disconnected."""

    cause = Cause.PEER_LOST


class TransferFailed(BackendError):
    """The transfer failed and is settled: the engine will touch neither side again."""


class TransferUnsettled(BackendError):
    """The engine cannot tell whether it is done with the memory; the rows stay quarantined."""


class RequestAborted(DisaggError):
    """The request ended before its data was complete; the message is the first cause, `cause` its kind."""

    def __init__(self, message: str, *, cause: Cause = Cause.ABORTED) -> None:
        super().__init__(message)
        self.cause = cause


class VerificationFailed(RequestAborted):
    """What arrived is not what was sent: the sums of the two sides differ."""

    def __init__(self, message: str) -> None:
        super().__init__(message, cause=Cause.VERIFICATION)


class RequestTimeout(DisaggError, TimeoutError):
    """A deadline passed."""

    cause = Cause.DEADLINE
