"""Checks of settings: ranges, written so that NaN fails them, and choices."""

import functools
import numbers
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dpvision.errors import ConfigError


def require(ok: bool, where: str, name: str, got: object, rule: str, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{where}: {name}={got!r}; expected {rule}. {remedy}")


def check_choices(config: Any) -> None:
    """Refuse a value that is not among its setting's choices: Python does not enforce type
    annotations.
    """
    kind: Any = type(config)
    for name, choices in _choices(kind).items():
        value = getattr(config, name)
        if value not in choices:
            rule = f"one of {', '.join(map(repr, choices))}"
            require(False, kind.__name__, name, value, rule, "Choose one of them.")


def convert_numbers(config: Any) -> None:
    """Make numbers of other types (of NumPy, 5e4 for 50000) those of a frozen dataclass's
    annotations, as a file has them; a whole number may stay where any will do. Refuse what is no
    such number.
    """
    kind: Any = type(config)
    for name, wanted in _numbers(kind).items():
        value = getattr(config, name)
        if value is None:
            continue
        fits = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if fits and wanted is int:
            fits = isinstance(value, numbers.Integral) or float(value).is_integer()
        rule = "a whole number" if wanted is int else "a number"
        require(fits, kind.__name__, name, value, rule, "Give one, without quotes.")
        if type(value) is not int:
            object.__setattr__(config, name, wanted(value))


@functools.cache
def _numbers(kind: type) -> dict[str, type]:
    """The settings of a dataclass that are numbers, with their type."""
    hints = get_type_hints(kind).items()
    return {
        name: wanted
        for name, hint in hints
        for wanted in (int, float)
        if hint in (wanted, wanted | None)
    }


@functools.cache
def _choices(kind: type) -> dict[str, tuple[Any, ...]]:
    """The settings of a dataclass that have choices, with these; its type hints take long to
    evaluate.
    """
    hints = get_type_hints(kind).items()
    return {name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}


def check_ranges(where: str, settings: Any, *rules: tuple[str, bool, str]) -> None:
    """Refuse the first setting, by name, whose rule does not hold."""
    for name, holds, rule in rules:
        require(holds, where, name, getattr(settings, name), rule, "Leave it out for the default.")
