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


class DisaggError(Exception):
    """Base of every error of this library."""


class ConfigError(DisaggError, ValueError):
    """A setting or an argument is wrong."""


class LayoutError(DisaggError, ValueError):
    """Two layouts cannot be matched, or rows do not fit a layout."""


class ProtocolError(DisaggError):
    """Base of protocol violations."""


class LocalProtocolError(ProtocolError):
    """The caller asked for a step that the protocol does not allow; nothing has changed."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something that the protocol does not allow."""


class BackendError(DisaggError):
    """Base of what a transfer engine reports."""


class BackendUnavailable(BackendError, ImportError):
    """The engine cannot be used here; the message names what is missing and the package that brings it."""


class NotRegistered(BackendError):
    """A copy names memory outside every registered region; nothing was posted."""


class PeerUnreachable(BackendError):
    """The peer cannot be reached, or was disconnected."""


class TransferFailed(BackendError):
    """The transfer failed and is settled: the engine will touch neither side again."""


class TransferUnsettled(BackendError):
    """The engine cannot tell whether it is done with the memory; the rows stay quarantined."""


class RequestAborted(DisaggError):
    """The request ended before its data was complete; the message is the first cause."""


class VerificationFailed(RequestAborted):
    """What arrived is not what was sent: the sums of the two sides differ."""


class RequestTimeout(DisaggError, TimeoutError):
    """A deadline passed."""
