"""Checks of settings: ranges, written so that NaN fails them, and choices."""

from typing import Any, Literal, get_args, get_origin, get_type_hints

from dpvision.errors import ConfigError


def require(ok: bool, where: str, name: str, got: object, rule: str, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{where}: {name}={got!r}; expected {rule}. {remedy}")


def check_choices(config: Any) -> None:
    """Refuse a value that is not among its setting's choices: Python does not enforce type
    annotations.
    """
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal:
            value, choices = getattr(config, name), get_args(hint)
            require(
                value in choices,
                type(config).__name__,
                name,
                value,
                f"one of {', '.join(map(repr, choices))}",
                "Choose one of them.",
            )


def check_ranges(where: str, settings: Any, *rules: tuple[str, bool, str]) -> None:
    """Refuse the first setting, by name, whose rule does not hold."""
    for name, holds, rule in rules:
        require(holds, where, name, getattr(settings, name), rule, "Leave it out for the default.")
