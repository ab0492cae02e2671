"""CURVE key pairs of control channels."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

import zmq
import zmq.auth.thread
import zmq.utils.z85

from disagg.core.errors import ConfigError
from disagg.core.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)


def check_key(key: object, *, what: str) -> None:
    """Raises `ConfigError`, which does not show the key."""
    try:
        valid = isinstance(key, str) and len(key) == 40 and len(zmq.utils.z85.decode(key.encode())) == 32
    except (ValueError, KeyError, struct.error):
        valid = False
    if not valid:
        found = f"{len(key)} other characters" if isinstance(key, str) else type(key).__name__
        raise ConfigError(f"{what}: expected a key of 40 Z85 characters or 64 hex digits, found {found}")


def parse_key(text: str, *, what: str) -> str:
    """A key of 40 Z85 characters or 64 hex digits, as Z85. Raises as `check_key`."""
    text = text.strip()
    if re.fullmatch("[0-9a-fA-F]{64}", text):
        return zmq.utils.z85.encode(bytes.fromhex(text)).decode()
    check_key(text, what=what)
    return text


def hexadecimal(key: str) -> str:
    """64 digits, which need no quotes in a shell."""
    return zmq.utils.z85.decode(key.encode()).hex()


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, as 40 characters of Z85 each, else `ConfigError` is raised. The secret is not printed."""

    public: str
    secret: str

    def __post_init__(self) -> None:
        check_key(self.public, what="public key")
        check_key(self.secret, what="secret key")

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r}, secret=<hidden>)"

    @classmethod
    def generate(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


def authenticator(context: zmq.Context[zmq.Socket[bytes]], allow: Callable[[str], bool]) -> zmq.auth.thread.ThreadAuthenticator:
    class Provider:
        def callback(self, _domain: str, key: bytes) -> bool:
            known = allow(key.decode())
            if not known:
                warnings.warning("refused a connection: its public key %s is not known", key.decode())
            return known

    warnings = RateLimitedLog(logger, repeat_s=60.0)
    started = zmq.auth.thread.ThreadAuthenticator(context)
    started.start()
    started.configure_curve_callback("*", Provider())
    return started
