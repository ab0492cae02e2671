"""How a setting is declared and read: from keywords, a TOML file, environment variables, or a command line."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
import tomllib
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from disagg.core.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "DISAGG_"
OTHER_VARIABLES = ("DISAGG_NVLINK_BLOCKS",)
"""Not settings of a rank: an engine reads them itself."""
_KUBERNETES = re.compile(
    PREFIX + r"(?:\w+?_)??(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)", re.ASCII
)
"""Kubernetes sets these in every pod for a Service `disagg` or `disagg-...`. `..._PORT` has a value such as
`tcp://host:port`.
"""


def meaning(text: str, **extra: Any) -> msgspec.Meta:
    """`flag` and `metavar` name the option if they do not follow from the key; `parse` reads text."""
    return msgspec.Meta(description=text, extra=extra)


@dataclasses.dataclass(frozen=True)
class Setting:
    """`key` is the name in files and keywords of `Config.load`, `field` the attribute."""

    key: str
    field: str
    kind: Any
    description: str
    extra: Mapping[str, Any]
    default: Any
    required: bool

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper()

    @property
    def flag(self) -> str:
        return str(self.extra.get("flag") or "--" + self.key.replace("_", "-"))

    @property
    def base(self) -> Any:
        """Without annotations and without `None`."""
        return _base(self.kind)


def settings(kind: type[msgspec.Struct]) -> tuple[Setting, ...]:
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
    """The names of a table of numbers such as `limits`; `None` for other types."""
    return tuple(field.name for field in dataclasses.fields(base)) if dataclasses.is_dataclass(base) else None


def is_table(setting: Setting) -> bool:
    """Whether text has the form `NAME=VALUE`."""
    return "parse" not in setting.extra and (
        typing.get_origin(setting.base) is Mapping or dataclasses.is_dataclass(setting.base)
    )


def is_list(setting: Setting) -> bool:
    return typing.get_origin(setting.base) is tuple


class _Source(NamedTuple):
    where: str
    values: Mapping[str, Any]
    text: bool = False

    def named(self, key: str) -> str:
        return self.where + key.upper() if self.where.endswith(PREFIX) else self.where


def sources(
    file: Path | str | None,
    environ: Mapping[str, str],
    texts: Mapping[str, str | Sequence[str]],
    keywords: Mapping[str, Any],
    *,
    known: Collection[str],
) -> tuple[_Source, ...]:
    """In ascending priority."""
    given = {
        name: value for name, value in environ.items() if name.startswith(PREFIX) and name not in OTHER_VARIABLES and value
    }
    foreign = [name for name, value in given.items() if _is_of_kubernetes(name, value, known)]
    if foreign:
        logger.warning("config: ignored what Kubernetes sets for a Service: %s", ", ".join(sorted(foreign)))
    ours = {name.removeprefix(PREFIX).lower(): value for name, value in given.items() if name not in foreign}
    return (
        _Source(f"file {file}", {} if file is None else _read(Path(file))),
        _Source(f"environment variable {PREFIX}", ours, text=True),
        _Source("command line", texts, text=True),
        _Source("keyword", keywords),
    )


def _is_of_kubernetes(name: str, value: str, known: Collection[str]) -> bool:
    found = _KUBERNETES.fullmatch(name)
    if found is None:
        return False
    if found[1] == "PORT":  # a setting may end like this, such as `metrics_port`
        return re.match("(tcp|udp|sctp)://", value) is not None
    return name.removeprefix(PREFIX).lower() not in known


def unknown_key(key: str, where: str, known: Collection[str]) -> ConfigError:
    return ConfigError(f"config: expected keys of {', '.join(known)}, found {key!r} ({where}){hint(key, known)}")


def hint(word: str, known: Iterable[str]) -> str:
    """`did_you_mean` as the end of a message."""
    meant = did_you_mean(word, known)
    return f"; {meant}" if meant else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Empty if no word is similar."""
    near = difflib.get_close_matches(word, list(known))
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: {error}") from error


def value_of(setting: Setting, value: Any, where: str, *, text: bool = False) -> Any:
    """Raises `ConfigError` with the key, what was expected and found, and where."""

    def wrong(expected: str, found: Any = value, hint: str = "") -> ConfigError:
        return ConfigError(f"config: key {setting.key!r}: expected {expected}, found {found!r} ({where}){hint}")

    parse = setting.extra.get("parse")
    if parse is not None:
        value = parse(value) if isinstance(value, str) else value
    elif text:
        value = _from_text(setting, value, wrong)
    names = names_of(setting.base)
    if names is not None and isinstance(value, Mapping):
        unknown = sorted(value.keys() - set(names))
        if unknown:
            raise wrong(f"names of {', '.join(names)}", unknown[0], hint(unknown[0], names))
    try:
        return msgspec.convert(value, setting.kind, strict=not text)
    except msgspec.ValidationError as error:
        said = str(error).partition(" - at ")[0]
        if not said.startswith(("Expected", "Invalid")):  # the object's own message about its values
            raise ConfigError(f"config: key {setting.key!r}: {said} ({where})") from None
        raise wrong(expected_of(setting, error)) from None


def _from_text(setting: Setting, value: str | Sequence[str], wrong: Callable[[str], ConfigError]) -> Any:
    """`value` has parts between commas, or is a text for each."""
    if not (is_list(setting) or is_table(setting)):
        return value
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)
    if is_list(setting):
        return parts
    pairs = [part.partition("=") for part in parts]
    if not all(name and equals and content for name, equals, content in pairs) or len({p[0] for p in pairs}) < len(pairs):
        raise wrong("NAME=VALUE, each name once")
    return {name: content for name, _, content in pairs}


def expected_of(setting: Setting, error: msgspec.ValidationError | None = None) -> str:
    if typing.get_origin(setting.base) is Literal:
        return "one of " + ", ".join(typing.get_args(setting.base))
    said, _, place = str(error or "").partition(" - at ")
    if not said.startswith("Expected "):
        return getattr(setting.base, "__name__", str(setting.base))
    said = said.removeprefix("Expected ").partition(", got")[0].replace("`", "").replace(" | null", "")
    said = {"object": "a table", "bool": "true or false"}.get(said, said)
    return said + (" as every value" if place.strip("`$") else "")
