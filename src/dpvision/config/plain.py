"""Convert settings to plain dicts, ready for JSON, and back."""

import contextlib
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from dpvision.errors import ConfigError

T = TypeVar("T")


def flat(classes: Callable[[], Mapping[str, type]], by: str = "") -> dict[str, Any]:
    """Return the metadata of a field that holds settings of its owner as one value. In dicts, files
    and dotted names they stand among the owner's other settings.

    Args:
        classes: returns the classes that the value may have, by the value of the setting ``by``.
            Settings of the others are known, and left out when a config is made.
    """
    return {"flat": (classes, by)}


def every_setting(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Return the value of a flat field with the settings of all classes that it may have, at their
    defaults where it has none, for a command line that offers them all.
    """
    classes = {type(value), *field.metadata["flat"][0]().values()}
    bases = [one for one in classes if not any(issubclass(cls, one) for cls in classes - {one})]
    if bases == [type(value)]:
        return value
    bases.sort(key=lambda cls: cls.__name__)
    made: Any = dataclasses.dataclass(frozen=True)(type(type(value).__name__, tuple(bases), {}))
    return made(**{f.name: getattr(value, f.name) for f in dataclasses.fields(value)})


def settings_of(config: Any, *, others: bool = True) -> dict[str, Any]:
    """Return a config's settings by name: its own, those of its flat fields, and with ``others``
    the defaults of those that its flat fields would have if they were of another class.
    """
    found: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if "flat" in f.metadata:
            for cls in f.metadata["flat"][0]().values() if others else ():
                found |= {one.name: one.default for one in dataclasses.fields(cls)}
            found |= settings_of(value, others=others)
        else:
            found[f.name] = value
    return found


def setting(config: Any, name: str) -> Any:
    """Return the value of a setting by its dotted name, as in ``settings_of``; None if unknown."""
    for part in name.split("."):
        config = settings_of(config).get(part) if dataclasses.is_dataclass(config) else None
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a config dataclass to a plain dict, ready for JSON; the inverse of ``from_dict``."""
    return json.loads(json.dumps(_plain(config, others=False), allow_nan=False))


def _plain(value: Any, *, others: bool) -> Any:
    if not dataclasses.is_dataclass(value):
        return value
    own = settings_of(value, others=others)
    return {name: _plain(one, others=others) for name, one in own.items()}


def from_dict(cls: type[T], values: Any, where: str = "config") -> T:
    """Make a config dataclass from the plain dict of ``to_dict``.

    Raises:
        ConfigError: a name is unknown or missing, a type is wrong, or a value is out of range.
    """
    if not isinstance(values, dict):
        raise ConfigError(
            f"{where}: {values!r}; expected an object of settings. Restore the file that the run "
            "wrote."
        )
    made, values = _flat_parts(cls, values, where)
    hints = {name: hint for name, hint in get_type_hints(cls).items() if name not in made}
    # An unknown setting that is None was not used by the version that wrote it.
    values = {name: value for name, value in values.items() if name in hints or value is not None}
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ConfigError(
            f"{where}: {unknown[0]}; expected one of {sorted(hints)}. Remove it, or use the "
            "version that wrote it."
        )
    made |= {name: _value(hints[name], value, f"{where}.{name}") for name, value in values.items()}
    try:
        return cls(**made)
    except TypeError as error:
        raise ConfigError(
            f"{where}: {error}; expected every setting without a default. Restore the file that "
            "the run wrote."
        ) from None


def _flat_parts(
    cls: type, values: dict[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the flat fields of ``cls``, and the settings that belong to none."""
    made: dict[str, Any] = {}
    for f in dataclasses.fields(typing.cast(Any, cls)):
        if "flat" in f.metadata:
            classes, by = f.metadata["flat"][0](), f.metadata["flat"][1]
            kind = values.get(by, next(iter(classes)))
            names = [{one.name for one in dataclasses.fields(one)} for one in classes.values()]
            if isinstance(kind, str) and kind in classes:
                own = {one.name for one in dataclasses.fields(classes[kind])}
                mine = {name: value for name, value in values.items() if name in own}
                made[f.name] = from_dict(classes[kind], mine, where)
            values = {n: v for n, v in values.items() if not any(n in one for one in names)}
    return made, values


def with_settings(config: T, settings: Mapping[str, Any]) -> T:
    """Return a config with settings replaced, by their dotted names.

    Raises:
        ConfigError: a name is unknown or is no single setting, a type is wrong, or a value is out
            of range.
    """
    values = json.loads(json.dumps(_plain(config, others=True), allow_nan=False))
    for name, value in settings.items():
        *above, last = name.split(".")
        inner: Any = values
        for part in above:
            inner = inner.get(part) if isinstance(inner, dict) else None
        several = dict if isinstance(value, list | tuple) else dict | list
        if not isinstance(inner, dict) or last not in inner or isinstance(inner[last], several):
            among = (
                sorted(key for key, old in inner.items() if not isinstance(old, dict | list))
                if isinstance(inner, dict)
                else None
            )
            known = (
                f"one of {', '.join(among)} in {'.'.join(above)}"
                if among and above
                else "PART.NAME, as in --help"
            )
            raise ConfigError(
                f"settings: {name!r}; expected {known}. `dpvision train --help` lists them."
            )
        inner[last] = value
    return from_dict(type(config), values)


def _value(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = [option for option in get_args(hint) if option is not type(None)]
        if value is None and len(options) < len(get_args(hint)):
            return None
        return _value(
            options[0] if len(options) == 1 else _by_kind(options, value, where), value, where
        )
    if origin is Literal:
        if value in get_args(hint):
            return value
    elif origin is tuple:
        inner = get_args(hint)
        if len(inner) == 2 and inner[1] is Ellipsis and isinstance(value, list | tuple):
            inner = (inner[0],) * len(value)
        if isinstance(value, list | tuple) and len(value) == len(inner):
            return tuple(_value(h, v, where) for h, v in zip(inner, value, strict=True))
    elif dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # a whole number beyond floats
            return float(value)
    elif hint in (int, str, bool) and type(value) is hint:
        return value
    raise ConfigError(f"{where}: {value!r}; expected {hint}. Change the value.")


def _by_kind(options: list[Any], value: Any, where: str) -> Any:
    """Choose the class by the ``kind`` in ``value``; without a kind the first, as in older
    files.
    """
    kinds = {get_args(get_type_hints(option)["kind"])[0]: option for option in options}
    kind = value.get("kind", next(iter(kinds))) if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        got = f"{where}.kind: {kind!r}" if isinstance(value, dict) else f"{where}: {value!r}"
        choices = ", ".join(map(repr, kinds))
        raise ConfigError(
            f"{got}; expected kind {choices}. Use one of them, or the version that wrote the file."
        )
    return kinds[kind]
