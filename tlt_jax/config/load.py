"""From a YAML file and `key.sub=value` overrides to a `Config`, with errors that a user can act on."""

import difflib
import re
import reprlib
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, SecretStr, ValidationError

from tlt_jax.config.schema import Config

REDACTED = "<redacted>"

# pydantic's names of its errors, and what a user should have written.
EXPECTED = {
    "list_type": "a list, as in [a, b]",
    "model_type": "a section: `key: value` pairs",
    "too_short": "a list with at least one entry",
}


class ConfigError(ValueError):
    """Something in the user's input is wrong: the program prints the message and exits with 2."""


class _Loader(yaml.SafeLoader):
    """Safe YAML in which `1e-4` is a number, `off`, `10:15` and `2026-11-30` are strings, unlike in YAML 1.1, and a key
    stands once."""


# Before the others, of which the first that fits decides: YAML 1.1 counts `10:15` in sixties.
_with_colons = ("tag:yaml.org,2002:str", re.compile(r"^[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?$"))
_Loader.yaml_implicit_resolvers = {
    first: [_with_colons, *((tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":timestamp")))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)

_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _mapping_without_repeats(loader: _Loader, node: yaml.MappingNode) -> dict:
    own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
    keys = [loader.construct_object(key, deep=True) for key in own]
    for key in keys:
        if not isinstance(key, str):
            raise ConfigError(
                f"config: {_short(key)} stands for a key (line {node.start_mark.line + 1} onwards); expected a name"
            )
        if keys.count(key) > 1:
            raise ConfigError(f"config: the key {key!r} stands twice (line {node.start_mark.line + 1} onwards)")
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats)


def load_config(path: str | Path | None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads the YAML file at `path` (None: all defaults), applies `key.sub=value` overrides in order, validates.

    Raises ConfigError, naming the key, its value, what was expected and the nearest right name.
    """
    tree = {} if path is None else read_config_tree(Path(path))
    for override in overrides:
        _apply_override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def dump_config(config: Config) -> str:
    """The resolved config as YAML, secrets redacted."""
    return yaml.safe_dump(redacted(config), sort_keys=False, allow_unicode=True)


def redacted(config: BaseModel) -> dict[str, Any]:
    """The config as plain values, with every secret that is set replaced by `<redacted>`."""

    def plain(value: Any) -> Any:
        if isinstance(value, SecretStr):
            return REDACTED
        if isinstance(value, BaseModel):
            return {name: plain(getattr(value, name)) for name in type(value).model_fields}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return plain(config)


def read_config_tree(path: Path) -> dict:
    """The YAML file as plain values, not yet validated. Raises ConfigError if it is not there or not a mapping."""
    try:
        there = path.is_file()
    except (OSError, ValueError) as error:  # a name too long, a zero byte
        raise ConfigError(f"config file {_short(str(path))} cannot be looked for: {error}") from None
    if not there and path.exists():
        raise ConfigError(f"config file {str(path)!r} is no regular file; expected a YAML file")
    if not there:
        raise ConfigError(f"config file {str(path)!r} does not exist{_nearest(path.name, _yaml_names(path.parent))}")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except ConfigError:
        raise
    except Exception as error:  # the parser's, of many kinds
        raise ConfigError(f"config file {str(path)!r} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {str(path)!r}: expected `key: value` pairs, got {type(tree).__name__}")
    return tree


def _yaml_names(folder: Path) -> list[str]:
    return [p.name for p in folder.glob("*.yaml")] if folder.is_dir() else []


def _apply_override(tree: dict, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected key.sub=value")
    try:
        # What YAML keeps for itself at the start, as in a pattern of files, can only be meant as text.
        value = text if text[:1] in ("*", "%", "@", "`", "") else yaml.load(text, _Loader)
    except ConfigError:
        raise
    except Exception:  # the parser's, of many kinds
        raise ConfigError(f"override {override!r}: {text!r} is not a YAML value") from None
    *parents, last = key.split(".")
    node = tree
    for depth, name in enumerate(parents):
        child = node.get(name)
        if child is None:
            child = node[name] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: `{'.'.join(parents[: depth + 1])}` is a value, not a section")
        node = child
    node[last] = value


def _explain(item: Any) -> str:
    """One line for one of pydantic's errors."""
    path = [str(part) for part in item["loc"]]
    key = ".".join(path) or "config"
    value = item["input"]
    if item["type"] == "extra_forbidden":
        return f"unknown key `{key}` (value {_short(value)}){_nearest_key(path)}"
    if item["type"] == "value_error":
        return f"`{key}`: {item['ctx']['error']}"
    if item["type"] == "missing":
        return f"`{key}` is missing"
    if item["type"] == "literal_error":
        names = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        meant = _nearest(value if isinstance(value, str) else "", names)
        return f"`{key}` is {_short(value)}; expected one of {', '.join(names)}{meant}"
    expected = EXPECTED.get(item["type"]) or item["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"`{key}` is {_short(value)} ({type(value).__name__}); expected {expected}"


def _short(value: Any) -> str:
    try:
        text = _REPR.repr(value)
    except ValueError:  # Python writes no number of so many digits
        text = "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


_REPR = reprlib.Repr()  # looks a few levels deep: YAML's aliases can hold more than a whole `repr` ends with
_REPR.maxstring = _REPR.maxother = 80


def all_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key that a config can hold."""
    keys = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        nested = [k for k in (kind, *typing.get_args(kind)) if isinstance(k, type) and issubclass(k, BaseModel)]
        keys += all_keys(nested[0], f"{prefix}{name}.") if nested else [prefix + name]
    return keys


def _nearest_key(path: list[str]) -> str:
    """The likeliest intended key: a sibling of that name, else the same last name elsewhere."""
    keys = all_keys()
    sections = sorted({key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)})
    wanted = ".".join(path)
    siblings = [k for k in keys + sections if k.split(".")[:-1] == path[:-1]]
    close = difflib.get_close_matches(wanted, siblings, 1, 0.6)
    close = close or [k for k in keys if k.split(".")[-1] == path[-1]][:1]
    close = close or difflib.get_close_matches(wanted, keys + sections, 1, 0.5)
    return (
        f"; did you mean `{close[0]}`?" if close else f"; known here: {', '.join(k.split('.')[-1] for k in siblings)}"
    )


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
