"""What each private head is fitted with unless a person says otherwise; chosen on public data (docs/heads.md)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from dpvision.config.heads import Candidate, HeadConfig
from dpvision.config.run import OptimConfig, RunConfig

HeadName = Candidate

_UNUSED = OptimConfig(name="sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.0, schedule="constant")


@dataclass(frozen=True)
class HeadPreset:
    """Settings that belong to one head."""

    steps: int
    """Releases, over full batches at no price in noise (docs/heads.md)."""
    optim: OptimConfig = _UNUSED
    """Heads in closed form have none."""
    loss: Literal["auto", "sigmoid", "softmax"] = "sigmoid"
    bias: float | None = 0.0
    constant: float = 0.0


PRESETS: Mapping[HeadName, HeadPreset] = MappingProxyType(
    {
        "one_step": HeadPreset(
            1, OptimConfig(name="lamb", learning_rate=1e-3, eps=1e-12, weight_decay=0.0, schedule="constant"), "sigmoid", -10.0
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
    """A head run's config with another head, and that head's steps, optimizer, loss, bias and constant.

    Args:
        reason: why, where the head was chosen by rule.
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
    """A head run's config that chooses among heads by a private score; all have as many releases as the one that wants most of them."""
    assert isinstance(config.model, HeadConfig)
    steps = max(PRESETS[name].steps for name in candidates)
    model = replace(config.model, head="auto", reason=None, candidates=candidates)
    return replace(config, model=model, privacy=replace(config.privacy, steps=steps))


def with_candidate(config: RunConfig, name: HeadName) -> RunConfig:
    """The config of one candidate: its own head, optimizer, loss and bias, and the releases that all of them have."""
    return replace(with_head(config, name), privacy=config.privacy)
