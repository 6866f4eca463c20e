"""Checks of settings: ranges, written so that NaN fails them, and choices."""

import functools
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
