"""What an operator says of one rank, in one typed object: from keywords, a TOML file, or environment variables `DISAGG_*`.

A setting is described once, where it is declared: its key, type, default and meaning are what the commands' `--help`, the
documentation's table and the errors say. A server that has settings of its own declares them in a subclass.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec

from disagg.core.errors import ConfigError
from disagg.core.topology import Topology
from disagg.layout.agreement import ModelId
from disagg.layout.placement import Component
from disagg.manager import KVManager
from disagg.protocol.messages import Verify
from disagg.protocol.peer_state import ConnectionLimits
from disagg.protocol.types import Limits
from disagg.runtime.keys import KeyPair

PREFIX = "DISAGG_"
OTHER_VARIABLES = ("DISAGG_NVLINK_BLOCKS",)
"""Variables with the prefix that are no settings of a rank: an engine reads them itself."""


def says(text: str, **extra: Any) -> msgspec.Meta:
    """A setting's meaning; `flag` and `metavar` are its option's where they do not follow from the key, `parse` reads text."""
    return msgspec.Meta(description=text, extra=extra)


Transport = Literal["auto", "rdma", "tcp", "shm"]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one `KVManager`, and of its peers. Every way to make one raises `ConfigError` that names the key, what
    was expected, what was found, and where.

        >>> Config(name="decode-0", transport="pigeon")
        Traceback (most recent call last):
        disagg.core.errors.ConfigError: config: key 'transport': expected one of auto, rdma, tcp, shm, found 'pigeon' (keyword)
    """

    name: Annotated[str, says("The instance's name, the same on all its ranks.")]
    listen: Annotated[str, says("This rank's control address; port 0: any.", metavar="ADDRESS")] = "tcp://127.0.0.1:0"
    advertise: Annotated[
        str | None, says("Where peers reach this rank, if it listens on every interface.", metavar="ADDRESS")
    ] = None
    leader: Annotated[str | None, says("Control address of rank 0, on every other rank.", metavar="ADDRESS")] = None
    peers: Annotated[
        Mapping[str, str],
        says("Peer instances, by the control address of their rank 0.", flag="--peer", metavar="NAME=ADDRESS"),
    ] = msgspec.field(default_factory=dict)
    peer_keys: Annotated[Mapping[str, str], says("Peer instances' public keys.", flag="--peer-key", metavar="NAME=KEY")] = (
        msgspec.field(default_factory=dict)
    )
    keys: Annotated[
        str | None, says("TOML file with this instance's public and secret key (`disagg keygen`).", metavar="FILE")
    ] = None
    insecure: Annotated[bool, says("Allow a control address off loopback without keys.")] = False
    trusted_network: Annotated[bool, says("Allow an engine that moves bytes over open TCP off loopback.")] = False
    backend: Annotated[str, says("Engine: auto, nixl, mooncake, nvlink, local, or a third party's.")] = "auto"
    transport: Annotated[Transport, says("What the engine may use.")] = "auto"
    devices: Annotated[
        tuple[str, ...], says("NICs that the engine may use; any, if none is given.", flag="--device-nic", metavar="NIC")
    ] = ()
    require: Annotated[
        Literal["rdma", "tcp", "shm"] | None, says("The transport that must be in use: starting up fails without it.")
    ] = None
    pack_below: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        says("Pack smaller pieces before they travel; 0: none; else as measured at connecting.", metavar="BYTES"),
    ] = None
    verify: Annotated[
        Verify,
        says("Whether what arrives is compared with what was sent, by sums: not, some pages of each request, or all of it."),
    ] = "off"
    metrics_port: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=65535)] | None,
        says("Serve Prometheus metrics at this port; 0: any; by default none.", metavar="PORT"),
    ] = None
    metrics_host: Annotated[str, says("The address that metrics are served at; they ask for no key.", metavar="HOST")] = (
        "127.0.0.1"
    )
    limits: Annotated[Limits, says("Bounds and times of the protocol.", flag="--limit", metavar="NAME=VALUE")] = Limits()
    connection_limits: Annotated[
        ConnectionLimits, says("Times of the handshake and of liveness.", flag="--link-limit", metavar="NAME=VALUE")
    ] = ConnectionLimits()

    def __post_init__(self) -> None:
        for setting in settings(type(self)):
            _value(setting, getattr(self, setting.field), "keyword")
        unknown = sorted(self.peer_keys.keys() - self.peers.keys())
        if unknown:
            raise ConfigError(f"config: key 'peer_keys': expected names of peers, found {unknown[0]!r}")

    @classmethod
    def load(
        cls,
        *,
        file: Path | str | None = None,
        environ: Mapping[str, str] | None = None,
        texts: Mapping[str, str | Sequence[str]] | None = None,
        **keywords: Any,
    ) -> Self:
        """The settings of a TOML file, of `environ` (such as `os.environ`), of `texts` (such as a command line), and of
        keywords: a later one goes before an earlier one. An empty variable counts as none. Raises `ConfigError`.

            >>> Config.load(environ={"DISAGG_TRANSPORT": "tcp", "DISAGG_PACK_BELOW": "4096"}, name="decode-0").pack_below
            4096
        """
        known = {setting.key: setting for setting in settings(cls)}
        found: dict[str, Any] = {}
        for source in _sources(file, environ or {}, texts or {}, keywords):
            for key, value in source.values.items():
                if key not in known:
                    raise ConfigError(f"config: expected keys of {', '.join(known)}, found {key!r} ({source.named(key)})")
                found[known[key].field] = _value(known[key], value, source.named(key), text=source.text)
        for setting in known.values():
            if setting.required and setting.field not in found:
                raise ConfigError(
                    f"config: key {setting.key!r}: expected {_expected(setting)}, found none: neither given, nor as "
                    f"{setting.variable}" + (f", nor in {file}" if file else "")
                )
        return cls(**found)

    def manager_arguments(self) -> dict[str, Any]:
        """What `KVManager` takes of this by keyword; its key file is read. Raises `ConfigError` naming the file."""
        given = {name: getattr(self, name) for name in Config.__struct_fields__ if name not in ("peers", "peer_keys")}
        return {**given, "keys": None if self.keys is None else read_keys(self.keys)}

    def manager(self, *, topology: Topology, components: Sequence[Component], model: ModelId) -> KVManager:
        """A manager with these settings that knows the peers; close it. Raises what `KVManager` raises."""
        manager = KVManager(topology=topology, components=components, model=model, **self.manager_arguments())
        try:
            for name, address in self.peers.items():
                manager.add_peer(name, address=address, public_key=self.peer_keys.get(name))
        except BaseException:
            manager.close()
            raise
        return manager


def read_keys(path: str | Path) -> KeyPair:
    """The key pair of a TOML file with `public` and `secret`, as `disagg keygen` writes it.

    Raises `ConfigError` naming the file, `OSError` where it cannot be read.
    """
    try:
        found = tomllib.loads(Path(path).read_text())
        return KeyPair(found["public"], found["secret"])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"keys {path}: expected a TOML file with public and secret: {type(error).__name__}: {error}"
        ) from error


# -- settings, as they are declared ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting. `key` is what files and keywords of `Config.load` call it, `field` the attribute, `kind` its type, with
    `None` where it may be absent.
    """

    key: str
    field: str
    kind: Any
    description: str
    extra: Mapping[str, Any]
    default: Any
    required: bool

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.key.upper()

    @property
    def flag(self) -> str:
        """Its option."""
        return str(self.extra.get("flag") or "--" + self.key.replace("_", "-"))

    @property
    def base(self) -> Any:
        """Its type without annotations and without `None`."""
        return _base(self.kind)


def settings(kind: type[Config]) -> tuple[Setting, ...]:
    """The settings that a class of configurations has, in the order of their declaration."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = []
    for each in msgspec.structs.fields(kind):
        metas = [meta for meta in _metas(hints[each.name]) if meta.description is not None]
        default = each.default if each.default_factory is msgspec.NODEFAULT else each.default_factory()
        text, extra = (metas[0].description or "", metas[0].extra or {}) if metas else ("", {})
        found.append(Setting(each.encode_name, each.name, hints[each.name], text, extra, default, each.required))
    return tuple(found)


def _metas(hint: Any) -> tuple[msgspec.Meta, ...]:
    return tuple(meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, msgspec.Meta))


def _base(hint: Any) -> Any:
    while True:
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if typing.get_origin(hint) is Annotated or (type(None) in typing.get_args(hint) and len(options) == 1):
            hint = options[0]
        else:
            return hint


def names_of(base: Any) -> tuple[str, ...] | None:
    """The keys of a table of numbers such as `limits`; `None` where it is no such table."""
    return tuple(field.name for field in dataclasses.fields(base)) if dataclasses.is_dataclass(base) else None


def is_table(setting: Setting) -> bool:
    """Whether it has names and values: written `NAME=VALUE` where there is only text."""
    return "parse" not in setting.extra and (
        typing.get_origin(setting.base) is Mapping or dataclasses.is_dataclass(setting.base)
    )


def is_list(setting: Setting) -> bool:
    """Whether it has several values."""
    return typing.get_origin(setting.base) is tuple


# -- values ------------------------------------------------------------------------------------------------------------


class _Source(NamedTuple):
    """Values by key, and whether they are text."""

    where: str
    values: Mapping[str, Any]
    text: bool = False

    def named(self, key: str) -> str:
        return self.where + key.upper() if self.where.endswith(PREFIX) else self.where


def _sources(
    file: Path | str | None,
    environ: Mapping[str, str],
    texts: Mapping[str, str | Sequence[str]],
    keywords: Mapping[str, Any],
) -> tuple[_Source, ...]:
    ours = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX) and name not in OTHER_VARIABLES and value
    }
    return (
        _Source(f"file {file}", {} if file is None else _read(Path(file))),
        _Source(f"environment variable {PREFIX}", ours, text=True),
        _Source("command line", texts, text=True),
        _Source("keyword", keywords),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: {error}") from error


def _value(setting: Setting, value: Any, where: str, *, text: bool = False) -> Any:
    """A value as its type; raises `ConfigError`."""

    def wrong(expected: str, found: Any = value) -> ConfigError:
        return ConfigError(f"config: key {setting.key!r}: expected {expected}, found {found!r} ({where})")

    parse = setting.extra.get("parse")
    if parse is not None:
        value = parse(value) if isinstance(value, str) else value
    elif text:
        value = _from_text(setting, value, wrong)
    names = names_of(setting.base)
    if names is not None and isinstance(value, Mapping):
        unknown = sorted(value.keys() - set(names))
        if unknown:
            raise wrong(f"names of {', '.join(names)}", unknown[0])
    try:
        return msgspec.convert(value, setting.kind, strict=not text)
    except msgspec.ValidationError as error:
        said = str(error).partition(" - at ")[0]
        if not said.startswith(("Expected", "Invalid")):  # an object's own sentence about its values
            raise ConfigError(f"config: key {setting.key!r}: {said} ({where})") from None
        raise wrong(_expected(setting, error)) from None


def _from_text(setting: Setting, value: str | Sequence[str], wrong: Any) -> Any:
    """Lists and tables from text: parts between commas, or one text for each."""
    if not (is_list(setting) or is_table(setting)):
        return value
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)
    if is_list(setting):
        return parts
    pairs = [part.partition("=") for part in parts]
    if not all(name and equals and content for name, equals, content in pairs) or len({p[0] for p in pairs}) < len(pairs):
        raise wrong("NAME=VALUE, each name once")
    return {name: content for name, _, content in pairs}


def _expected(setting: Setting, error: msgspec.ValidationError | None = None) -> str:
    """What would have been right, in words."""
    if typing.get_origin(setting.base) is Literal:
        return "one of " + ", ".join(typing.get_args(setting.base))
    said, _, place = str(error or "").partition(" - at ")
    if not said.startswith("Expected "):
        return getattr(setting.base, "__name__", str(setting.base))
    said = said.removeprefix("Expected ").partition(", got")[0].replace("`", "").replace(" | null", "")
    return said + (" as every value" if place.strip("`$") else "")
