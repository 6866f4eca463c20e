"""The settings that a study varies: names, ranges and lists, and which of them keep the price."""

import contextlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dpvision.config import HeadConfig, RunConfig, with_settings
from dpvision.config.resolve import applied, unread
from dpvision.errors import ConfigError

Settings = Mapping[str, Any]
How = Literal["simulated", "public", "charged", "private-selection"]

_FORM = "NAME=VALUE,VALUE,..., NAME=LOW..HIGH, or NAME=log LOW..HIGH"
_FREE = ("optim.", "model.", "data.", "privacy.max_grad_norm", "privacy.clipping")
_OF_THE_PRICE = ("privacy.expected_batch_size", "privacy.steps")
"""Settings that may vary only if the trials cost no epsilon and the recipe has a target epsilon,
which the final run then meets.
"""
_FIXED = {
    "data.store",
    "data.images",
    "data.tokenizer",
    "model.kind",
    "model.num_classes",
    "model.multi_label",
    "model.vocab_size",
}
_FIXED_OF_HEADS = {
    "model.head",
    "model.reason",
    "model.selection_runs",
    "model.selection_shape",
    "model.encoder",
}


@dataclass(frozen=True)
class Range:
    """All numbers from ``low`` to ``high``, or all whole numbers."""

    low: float
    high: float
    log: bool
    whole: bool


Space = Mapping[str, Range | tuple[Any, ...]]


def parse_space(typed: Sequence[str], config: RunConfig, how: How) -> Space:
    """Return the space of the options --space, after trying the ends of every range and every value
    of every list in ``config``.

    Raises:
        ConfigError: no setting, a setting given twice, of unknown name or wrong form, out of range,
            or one that would change the price.
    """
    space: dict[str, Range | tuple[Any, ...]] = {}
    for text in typed:
        name, equals, values = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or not name or name in space:
            raise ConfigError(
                f"tune: --space {text!r}; expected {_FORM}, each name once. E.g. "
                '"optim.learning_rate=log 1e-4..1e-2".'
            )
        found = _values(text, values)
        for value in (found.low, found.high) if isinstance(found, Range) else found:
            with_settings(config, {name: value})
        if isinstance(found, Range) and found.whole:
            with contextlib.suppress(ConfigError):  # a setting that takes fractions
                with_settings(config, {name: float(found.low)})
                found = replace(found, whole=False)
        _check_price(name, config, how)
        space[name] = found
    choices = {name: found for name, found in space.items() if isinstance(found, tuple)}
    for name in space:
        others = [
            {other: value} for other, values in choices.items() if other != name for value in values
        ]
        refused = [unread(applied(config, one)).get(name) for one in ({}, *others)]
        if all(refused):
            raise ConfigError(
                f"tune: {name} is not read: {refused[0]}; expected settings with an effect. "
                "Leave it out of --space."
            )
    if not space:
        raise ConfigError(
            f"tune: no --space; expected settings to vary, as {_FORM}. E.g. --space "
            '"optim.learning_rate=log 1e-4..1e-2".'
        )
    return space


def grid(space: Space, most: int) -> list[Settings]:
    """Return all combinations of a space of lists.

    Raises:
        ConfigError: a range, or fewer than two combinations, or more than ``most``.
    """
    lists = []
    for name, values in space.items():
        if isinstance(values, Range):
            raise ConfigError(
                f"tune: {name} is a range; expected a list, because a private selection draws "
                "from a list fixed beforehand."
            )
        lists.append([(name, value) for value in values])
    count = math.prod(map(len, lists))
    if not 2 <= count <= most:
        raise ConfigError(
            f"tune: --space has {count} combinations; expected 2 to {most} for a private "
            "selection. Change the lists."
        )
    return [dict(chosen) for chosen in itertools.product(*lists)]


def _values(text: str, values: str) -> Range | tuple[Any, ...]:
    words = values.split()
    log = words[:1] == ["log"]
    low, dots, high = "".join(words[1:] if log else words).partition("..")
    if not dots:
        if log:
            raise ConfigError(
                f"tune: --space {text!r}; expected LOW..HIGH after log. Write {_FORM}."
            )
        found = tuple(_scalar(text, value.strip()) for value in values.split(","))
        if len({json.dumps(value) for value in found}) < len(found):
            raise ConfigError(f"tune: --space {text!r}; expected different values. Give each once.")
        return found
    ends = (_scalar(text, low), _scalar(text, high))
    if (
        any(isinstance(end, bool) or not isinstance(end, int | float) for end in ends)
        or not ends[0] < ends[1]
        or (log and not ends[0] > 0)
    ):
        above = " above 0" if log else ""
        raise ConfigError(
            f"tune: --space {text!r}; expected two numbers{above}, the first one smaller. Write "
            f"{_FORM}."
        )
    return Range(*ends, log, whole=all(isinstance(end, int) for end in ends))


def _scalar(text: str, value: str) -> Any:
    """A value as typed: a number, true, false, None, or a word."""
    try:
        found = json.loads({"None": "null", "True": "true", "False": "false"}.get(value, value))
    except ValueError:
        found = value
    if (
        not value
        or isinstance(found, list | dict)
        or (isinstance(found, float) and not math.isfinite(found))
    ):
        raise ConfigError(
            f"tune: --space {text!r}: {value!r}; expected a finite number or a word. Write {_FORM}."
        )
    return found


def _check_price(name: str, config: RunConfig, how: How) -> None:
    fixed = _FIXED | (_FIXED_OF_HEADS if isinstance(config.model, HeadConfig) else set())
    if name in _OF_THE_PRICE:
        targets = config.privacy.target_epsilon, config.privacy.target_unit_epsilon
        if (
            how in ("simulated", "public")
            and targets != (None, None)
            and config.privacy.sampling != "full_batch"
        ):
            return
        raise ConfigError(
            f"tune: {name} changes what a trial costs; expected a setting that keeps the printed "
            "price. Vary it with --how simulated or public, and a --privacy.target-epsilon, "
            "with Poisson batches."
        )
    if not name.startswith(_FREE) or any(
        name == one or name.startswith(f"{one}.") for one in fixed
    ):
        raise ConfigError(
            f"tune: {name} changes the guarantee, the data, or the machine; expected a setting "
            "of optim, model or data, privacy.max_grad_norm or privacy.clipping. Fix it with an "
            "option of its own, the same in all trials."
        )
