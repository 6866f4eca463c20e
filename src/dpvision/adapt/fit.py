"""The kinds of heads, and the training of the one that a config names."""

from collections.abc import Callable
from dataclasses import replace

from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.heads.feature_covariance import FEATURE_COVARIANCE
from dpvision.adapt.heads.kind import Fitted, HeadKind, Progress, Task
from dpvision.adapt.heads.least_squares import LEAST_SQUARES
from dpvision.adapt.heads.many_steps import MANY_STEPS
from dpvision.adapt.heads.one_step import ONE_STEP
from dpvision.adapt.heads.prototypes import PROTOTYPES
from dpvision.adapt.release import Releases
from dpvision.config import HeadConfig, RunConfig
from dpvision.config.heads import HEADS

KINDS: dict[str, HeadKind] = {
    kind.name: kind
    for kind in (ONE_STEP, MANY_STEPS, LEAST_SQUARES, FEATURE_COVARIANCE, PROTOTYPES)
}
assert KINDS.keys() == HEADS.keys(), "config.heads.HEADS must have the settings of every kind"


def kind_of(config: RunConfig) -> HeadKind:
    """Return the kind of the head that a config names."""
    assert isinstance(config.model, HeadConfig)
    return KINDS[config.model.head]


def fit_head(
    config: RunConfig,
    stream: FeatureStream,
    releases: Releases,
    *,
    start: Progress | None = None,
    after_step: Callable[[Callable[[], Fitted]], None] = lambda fitted: None,
) -> Fitted:
    """Train the head of ``config.model`` with all releases left. Every setting comes from the
    config; ``start`` and ``after_step`` as in ``Task``.

    Raises:
        ConfigError: too few releases are left for this head.
        PrivacyError: a release is refused.
    """
    assert isinstance(config.model, HeadConfig)
    model = config.model.settled()
    assert model.features.constant is not None
    stream = replace(stream, constant=model.features.constant)
    task = Task(stream, releases, replace(config, model=model), start, after_step)
    return kind_of(config).fit(task)
