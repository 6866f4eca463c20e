"""Default settings of each private head, chosen on public data (docs/heads.md)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, cast

from dpvision.config.heads import Candidate, HeadConfig
from dpvision.config.plain import with_settings
from dpvision.config.run import LAMB_EPS, OptimConfig, RunConfig
from dpvision.errors import ConfigError

HeadName = Candidate

_UNUSED = OptimConfig(name="sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.0, schedule="constant")


@dataclass(frozen=True)
class HeadPreset:
    """Default settings of one head."""

    steps: int
    """Number of full-batch releases, over which the budget is divided without loss (docs/heads.md)."""
    optim: OptimConfig = _UNUSED
    """Not used by heads in closed form."""
    loss: Literal["auto", "sigmoid", "softmax"] = "sigmoid"
    bias: float | None = 0.0
    constant: float = 0.0


PRESETS: Mapping[HeadName, HeadPreset] = MappingProxyType(
    {
        "one_step": HeadPreset(
            1, OptimConfig(name="lamb", learning_rate=1e-3, eps=LAMB_EPS, weight_decay=0.0, schedule="constant"), "sigmoid", -10.0
        ),
        "many_steps": HeadPreset(
            60,
            OptimConfig(name="sgd", learning_rate=None, momentum=0.9, weight_decay=0.0, schedule="constant"),
            "auto",
            None,
            0.1,
        ),
        "least_squares": HeadPreset(1),
        "feature_covariance": HeadPreset(
            8, OptimConfig(name="sgd", learning_rate=2.0, momentum=0.0, weight_decay=0.0, schedule="constant"), "softmax", 0.0
        ),
        "prototypes": HeadPreset(1),
    }
)


def with_head(config: RunConfig, head: HeadName, reason: str | None = None) -> RunConfig:
    """Replace the head in a head run's config, with its steps, optimizer, loss, bias and constant.

    Args:
        reason: why the head was chosen, if by rule.
    """
    assert isinstance(config.model, HeadConfig)
    preset = PRESETS[head]
    return replace(
        config,
        model=replace(config.model, head=head, reason=reason, loss=preset.loss, bias=preset.bias, constant=preset.constant),
        optim=preset.optim,
        privacy=replace(config.privacy, steps=preset.steps),
    )


def with_candidates(config: RunConfig, candidates: tuple[HeadName, ...]) -> RunConfig:
    """Make a head run's config choose among heads by a private score; all get the largest number of releases among them."""
    assert isinstance(config.model, HeadConfig)
    steps = max(PRESETS[name].steps for name in candidates)
    model = replace(config.model, head="auto", reason=None, candidates=candidates)
    return replace(config, model=model, privacy=replace(config.privacy, steps=steps))


_OF_A_CANDIDATE = {f"model.{name}" for name in ("loss", "bias", "constant", "feature_norm", "init", "init_scale")}


def candidate_name(settings: Mapping[str, Any]) -> str:
    """Return settings of one head as an entry of ``HeadConfig.candidates``.

    Raises:
        ConfigError: a setting is not one in which candidates may differ.
    """
    for name in settings:
        if not name.startswith("optim.") and name not in _OF_A_CANDIDATE:
            raise ConfigError(
                f"select: {name}; expected optim.* or one of {', '.join(sorted(_OF_A_CANDIDATE))}, because candidates share features, "
                "releases, clipping and noise. Fix it for all of them."
            )
    return " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())


def with_candidate(config: RunConfig, name: str) -> RunConfig:
    """Make the config of one candidate: its head, optimizer, loss and bias, or its settings, with the common number of releases.

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
            f"select: {name!r}; expected part.name=value, values in JSON, separated by spaces. E.g. optim.learning_rate=3"
        ) from None
    candidate_name(settings)
    return with_settings(config, settings)
