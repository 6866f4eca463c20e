"""Default settings of each private head, chosen on public data (docs/heads.md)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, cast

from dpvision.config.heads import OWN, Candidate, HeadConfig
from dpvision.config.plain import with_settings
from dpvision.config.run import LAMB_EPS, OptimConfig, RunConfig
from dpvision.errors import ConfigError

HeadName = Candidate

_UNUSED = OptimConfig(
    name="sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.0, schedule="constant"
)


@dataclass(frozen=True)
class HeadPreset:
    """Default settings of one head."""

    steps: int
    """Number of full-batch releases, over which the budget is divided without loss
    (docs/heads.md).
    """
    loss: Literal["auto", "sigmoid", "softmax"]
    bias: float | None
    constant: float
    optim: OptimConfig = _UNUSED
    """Not used by heads in closed form."""


_CONSTANT_RATE: dict[str, Any] = {"weight_decay": 0.0, "schedule": "constant"}
PRESETS: Mapping[HeadName, HeadPreset] = MappingProxyType(
    {
        "one_step": HeadPreset(
            1,
            *OWN["one_step"],
            OptimConfig(name="lamb", learning_rate=1e-3, eps=LAMB_EPS, **_CONSTANT_RATE),
        ),
        "many_steps": HeadPreset(
            60,
            *OWN["many_steps"],
            OptimConfig(name="sgd", learning_rate=None, momentum=0.9, **_CONSTANT_RATE),
        ),
        "least_squares": HeadPreset(1, *OWN["least_squares"]),
        "feature_covariance": HeadPreset(
            8,
            *OWN["feature_covariance"],
            OptimConfig(name="sgd", learning_rate=2.0, momentum=0.0, **_CONSTANT_RATE),
        ),
        "prototypes": HeadPreset(1, *OWN["prototypes"]),
    }
)


def with_head(config: RunConfig, head: HeadName) -> RunConfig:
    """Return a head run's config with another head, its optimizer, and its own number of steps."""
    assert isinstance(config.model, HeadConfig)
    return replace(
        config,
        model=replace(config.model, head=head),
        optim=PRESETS[head].optim,
        privacy=replace(config.privacy, steps=None),
    )


def with_steps(config: RunConfig) -> RunConfig:
    """Return the config with its head's own number of steps if it has none; candidates get the
    largest of theirs.
    """
    model = config.model
    if config.privacy.steps is not None or not isinstance(model, HeadConfig):
        return config
    names = (
        model.candidates if model.candidates and "=" not in model.candidates[0] else (model.head,)
    )
    steps = max(
        PRESETS["many_steps" if name == "auto" else cast(HeadName, name)].steps for name in names
    )
    return replace(config, privacy=replace(config.privacy, steps=steps))


_OF_A_CANDIDATE = {
    f"model.{name}" for name in ("loss", "bias", "constant", "feature_norm", "init", "init_scale")
}


def candidate_name(settings: Mapping[str, Any]) -> str:
    """Return settings of one head as an entry of ``HeadConfig.candidates``.

    Raises:
        ConfigError: a setting is not one in which candidates may differ.
    """
    for name in settings:
        if not name.startswith("optim.") and name not in _OF_A_CANDIDATE:
            raise ConfigError(
                f"select: {name}; expected optim.* or one of "
                f"{', '.join(sorted(_OF_A_CANDIDATE))}, because candidates share features, "
                "releases, clipping and noise. Fix it for all of them."
            )
    return " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())


def with_candidate(config: RunConfig, name: str) -> RunConfig:
    """Make the config of one candidate: its head, optimizer, loss and bias, or its settings, with
    the common number of releases.

    Raises:
        ConfigError: a setting is unknown, out of range, or not one in which candidates may differ.
    """
    if "=" not in name:
        return replace(with_head(config, cast(HeadName, name)), privacy=config.privacy)
    pairs = (part.partition("=") for part in name.split(" "))
    try:
        settings = {part: json.loads(value) for part, _, value in pairs}
    except ValueError:
        raise ConfigError(
            f"select: {name!r}; expected part.name=value, values in JSON, separated by spaces. "
            "E.g. optim.learning_rate=3"
        ) from None
    candidate_name(settings)
    return with_settings(config, settings)
