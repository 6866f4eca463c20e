"""Train the head that a config names, from a feature stream and the releases of a plan."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from dpvision.adapt.descent import AfterStep, Progress, Trained, many_steps, one_step
from dpvision.adapt.feature_covariance import feature_covariance
from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.least_squares import least_squares
from dpvision.adapt.prototypes import prototypes
from dpvision.adapt.rate import with_rate
from dpvision.adapt.release import Releases
from dpvision.adapt.select import Candidate, Selected, select_head
from dpvision.config import HeadConfig, RunConfig
from dpvision.config.head_presets import with_candidate
from dpvision.errors import PrivacyError
from dpvision.privacy.plan import DPPlan, run_plans


@dataclass(frozen=True)
class Fitted:
    """A trained head and, if the config asks for one, its exponential moving average."""

    head: Head
    ema: Head | None = None
    progress: Progress | None = None
    """What more steps start from; None for heads that cannot go on."""


def fit_head(
    config: RunConfig,
    stream: FeatureStream,
    releases: Releases,
    *,
    start: Progress | None = None,
    after_step: Callable[[Callable[[], Fitted]], None] = lambda fitted: None,
) -> Fitted:
    """Train the head of ``config.model`` with all releases left. Every setting comes from the
    config.

    Args:
        start: go on from these steps (many_steps and feature_covariance only).
        after_step: called after each step with a function that returns the head so far (these two
            only).

    Raises:
        ConfigError: too few releases are left for this head.
        PrivacyError: a release is refused.
    """
    assert isinstance(config.model, HeadConfig)
    cfg = config.model.settled()
    assert cfg.loss != "auto" and cfg.bias is not None and cfg.constant is not None
    stream = replace(stream, constant=cfg.constant)
    after: AfterStep = lambda trained: after_step(lambda: _chosen(cfg, trained()))  # noqa: E731
    match cfg.head:
        case "one_step":
            return Fitted(
                one_step(stream, releases, loss=cfg.loss, optim=config.optim, bias=cfg.bias)
            )
        case "many_steps":
            return _chosen(
                cfg,
                many_steps(
                    stream,
                    releases,
                    loss=cfg.loss,
                    optim=config.optim,
                    bias=cfg.bias,
                    init=cfg.init,
                    init_scale=cfg.init_scale,
                    seed=config.seed,
                    start=start,
                    after_step=after,
                ),
            )
        case "feature_covariance":
            return _chosen(
                cfg,
                feature_covariance(
                    stream,
                    releases,
                    feature_norm=cfg.feature_norm,
                    loss=cfg.loss,
                    optim=config.optim,
                    bias=cfg.bias,
                    start=start,
                    after_step=after,
                ),
            )
        case "least_squares":
            return Fitted(least_squares(stream, releases, feature_norm=cfg.feature_norm))
        case "prototypes":
            return Fitted(prototypes(stream, releases, feature_norm=cfg.feature_norm))
    raise AssertionError(f"{cfg.head} is settled before")


def _chosen(cfg: HeadConfig, trained: Trained) -> Fitted:
    heads = {"last": trained.last, "average": trained.average, "ema": trained.ema}
    head = heads[cfg.iterate]
    assert head is not None, "checked before"
    return Fitted(head, trained.ema, trained.progress)


def choose_head(
    config: RunConfig,
    stream: FeatureStream,
    plan: DPPlan,
    charge: Callable[[], int],
    *,
    bounded: bool = True,
) -> tuple[RunConfig, Selected]:
    """Choose the best of ``config.model.candidates`` by a private score.

    Args:
        plan: must have a selection.
        charge: ``ledger.append``; called once, before anything is computed from the records.
        bounded: as in ``rate.steps_rate``, for candidates without a rate.

    Returns:
        The config of the chosen candidate, and everything that the selection releases.

    Raises:
        ConfigError: a candidate cannot be trained with these releases. Nothing has been charged.
        PrivacyError: the secret number of runs was 0 (Poisson only). Nothing is released, and the
            epsilon is spent.
    """
    assert isinstance(config.model, HeadConfig)
    asked: dict[str, RunConfig] = {}
    for name in config.model.candidates:
        candidate = with_candidate(config, name)
        assert isinstance(candidate.model, HeadConfig)
        optim = with_rate(candidate.optim, run_plans(plan)[0], bounded=bounded)
        asked[name] = replace(candidate, model=candidate.model.settled(), optim=optim)
    candidates = [
        Candidate(name, partial(_fit_last, candidate)) for name, candidate in asked.items()
    ]
    selected = select_head(stream, candidates, plan, charge)
    if selected is None:
        raise PrivacyError(
            "adapt: selection_runs=0 was drawn, as a Poisson number sometimes is; expected at "
            "least 1. Nothing is released, but the epsilon is spent. Start a new run under "
            "another --name; with --model.selection-shape 1 the number is never 0."
        )
    return asked[selected.candidate], selected


def _fit_last(config: RunConfig, stream: FeatureStream, releases: Releases) -> Head:
    return fit_head(config, stream, releases).head
