"""A command line as options and the settings that were typed. Tyro parses both; nothing else reads
the words.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from dpvision.cli.output import CONFIG
from dpvision.config import RunConfig
from dpvision.config.plain import every_setting
from dpvision.errors import ConfigError

T = TypeVar("T")

_NOT_TYPED = {"recipe", "kind", "delta_for"}
"""Fields that say what a config is."""


@dataclass(frozen=True)
class _Default:
    """A value that was not typed."""

    value: Any


@dataclass(frozen=True)
class _First:
    help: Annotated[bool, tyro.conf.arg(aliases=["-h"])] = False


def parse_run(
    options: T, config: RunConfig, argv: Sequence[str], prog: str, description: str
) -> tuple[T, dict[str, Any]]:
    """Parse options and settings, by dotted name; on wrong usage, and with --help, tyro prints help
    and exits.

    Args:
        options: a dataclass of defaults.
        config: has the settings, and the defaults shown in the help.

    Returns:
        The options, and the settings that were typed.
    """
    both = _words(options, config)
    found = tyro.cli(
        both, prog=f"dpvision {prog}", description=description, args=list(argv), config=CONFIG
    )
    return found.options, _typed(found.config, config)


def parse_first(
    options: T, config: RunConfig, argv: Sequence[str]
) -> tuple[T, dict[str, Any], bool]:
    """Return what determines a command's recipe, before its settings are known: the options, the
    settings that any recipe has, and whether help is asked for. Unknown words are left to
    ``parse_run``.
    """
    both = _words(options, config, ("asks", _First, _First()))
    found: Any = tyro.cli(
        both, args=list(argv), config=CONFIG, add_help=False, return_unknown_args=True
    )[0]
    first = found.options
    if (
        getattr(first, "recipe", None) == "[]"
    ):  # tyro's, of an option that it does not know before any word
        first = dataclasses.replace(first, recipe="")
    return first, _typed(found.config, config), found.asks.help


def joined(typed: Mapping[str, Any], short: Mapping[str, Any]) -> dict[str, Any]:
    """Return typed settings and those that short options stand for; None is an option that was not
    given.

    Raises:
        ConfigError: one was given in both ways, with different values.
    """
    given = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in short.items()
        if value is not None
    }
    for name, value in given.items():
        if name in typed and typed[name] != value:
            raise ConfigError(
                f"settings: {name}={typed[name]!r} and {value!r}; expected it once. Drop the "
                "short or the long option."
            )
    return {**typed, **given}


def optional(cls: type[T], *names: str) -> T:
    """Return options for these fields of a dataclass, as a value of it: an option that is not given
    is None, and so are all other fields. Nothing is checked.
    """
    hints = get_type_hints(cls)
    return _subclass(
        cls,
        {
            f.name: (
                hints[f.name] | None if f.name in names else Annotated[None, tyro.conf.Suppress],
                None,
            )
            for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        },
    )()


def words_of(name: str, value: Any) -> list[str]:
    """Return a setting as the words of a command line."""
    option = f"--{name.replace('_', '-')}"
    part, _, last = option.rpartition(".")
    if isinstance(value, bool):
        return [option if value else f"{part}.no-{last}"]
    return [option, *map(str, value if isinstance(value, tuple) else [value])]


def _words(options: Any, config: RunConfig, *more: tuple[str, type, Any]) -> Any:
    settings = _untyped(config)
    parts = [("options", type(options), options), ("config", settings, settings()), *more]
    fields = [
        (name, Annotated[cls, tyro.conf.arg(name="")], field(default=value))
        for name, cls, value in parts
    ]
    return dataclasses.make_dataclass("Words", fields, frozen=True)


# Tyro reads the docstrings of each class once, and Python parses the whole file for it.
@functools.lru_cache(maxsize=64)
def _untyped(config: Any) -> Any:
    """Return a dataclass with the fields of ``config`` whose values are all marked as defaults,
    except flags: these can only be changed. Of a flat field it has the settings of all classes.
    """
    cls, hints = type(config), get_type_hints(type(config))
    flat = [f.metadata["flat"] for f in dataclasses.fields(config) if "flat" in f.metadata]
    hints |= {by: Literal[tuple(classes())] for classes, by in flat if by}
    made: dict[str, tuple[Any, Any]] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        hint: Any
        default: Any = _Default(value)
        if f.name in _NOT_TYPED:
            hint = Annotated[_Default, tyro.conf.Suppress]
        elif "flat" in f.metadata:
            every = _untyped(every_setting(f, value))
            hint = Annotated[every, tyro.conf.arg(name="")]
            default = field(default_factory=every)
        elif dataclasses.is_dataclass(value):
            hint = _untyped(getattr(config, f.name))
            default = field(default_factory=hint)
        elif isinstance(value, bool):
            hint, default = bool, value
        else:
            hint = Annotated[_Default, _spec(hints[f.name])]
        made[f.name] = hint, default
    return _subclass(cls, made)


def _subclass(cls: type, made: Mapping[str, tuple[Any, Any]]) -> Any:
    """Return a dataclass with the fields of ``cls``, of these types and defaults.

    It is a subclass: tyro finds the fields' docstrings in the source of its base. It has no check
    of ranges: settings are checked together, later.
    """
    about = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
    about["__annotations__"] = {name: hint for name, (hint, _) in made.items()}
    about |= {name: default for name, (_, default) in made.items()}
    return dataclass(frozen=True)(
        type(cls.__name__, (cls,), about | {"__post_init__": lambda self: None})
    )


def _spec(hint: Any) -> PrimitiveConstructorSpec[Any]:
    """Return how tyro parses a type, for fields whose default is marked."""
    spec: Any = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(hint, set()))
    return dataclasses.replace(
        spec,
        is_instance=lambda value: isinstance(value, _Default),
        str_from_instance=lambda value: spec.str_from_instance(value.value),
    )


def _typed(found: Any, config: Any, part: str = "") -> dict[str, Any]:
    """Return the values that are no defaults, by dotted name."""
    typed: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value, default = getattr(found, f.name), getattr(config, f.name)
        if "flat" in f.metadata:
            typed |= _typed(value, every_setting(f, default), part)
        elif dataclasses.is_dataclass(default):
            typed |= _typed(value, default, f"{part}{f.name}.")
        elif not isinstance(value, _Default) and not (
            isinstance(default, bool) and value == default
        ):
            typed[part + f.name] = value
    return typed
