"""The protocols by name, their settings, and those that need no more than features.

Legend: N records, D numbers of a feature.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import torch

from dpvision.errors import ConfigError, DataError
from dpvision.eval.any_of_labels import SeveralLabels, several_score
from dpvision.eval.metric import Metric, chance_level, measure, t_interval, titled
from dpvision.eval.probes.dpcap_probe import dpcap_probe
from dpvision.eval.probes.few_shot import FewShotSettings, few_shot_probe
from dpvision.eval.probes.fine_tune import FineTuneSettings
from dpvision.eval.probes.knn import knn_predict
from dpvision.eval.probes.lars_probe import LarsSettings
from dpvision.eval.probes.linear_probe import fit_linear_probe
from dpvision.eval.probes.records import LabelledFeatures, check_labels
from dpvision.eval.probes.ridge import fit_ridge
from dpvision.eval.score import Score

Protocol = Literal["knn", "linear", "ridge", "linear_lars", "linear_cls", "few_shot", "few_shot_probe", "few_shot_dpcap", "own_head"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
DEFAULT_PROTOCOLS: tuple[Protocol, ...] = ("knn", "linear")
Control = Literal["random", "pixels"]
CONTROLS: tuple[Control, ...] = get_args(Control)
Visibility = Literal["private", "public"]

ON_FEATURES = ("knn", "linear", "ridge", "few_shot_probe", "few_shot_dpcap")
"""Protocols that look at cached features only; the others need the network or the run."""


@dataclass(frozen=True)
class ProtocolSettings:
    """The knobs of all protocols; the defaults are the papers'."""

    k: int = 20
    """Neighbours of k-NN."""
    shots: tuple[int, ...] = (10,)
    """Pictures per class of the few-shot protocols."""
    metric: Metric | None = None
    """None: what the training store declares, else accuracy."""
    probe: FewShotSettings = field(default_factory=FewShotSettings)
    tune: FineTuneSettings = field(default_factory=FineTuneSettings)
    lars: LarsSettings = field(default_factory=LarsSettings)

    def __post_init__(self) -> None:
        if not self.k >= 1:
            raise ConfigError(f"evaluate: k={self.k!r}; expected at least 1 neighbour. Use 20.")
        if not self.shots or not all(k >= 1 for k in self.shots):
            raise ConfigError(f"evaluate: shots={self.shots!r}; expected at least 1 picture per class. Use 10.")


def checked_protocols(names: Iterable[str]) -> tuple[Protocol, ...]:
    """The protocols of these names. Raises ConfigError for an unknown one, or for none."""
    found = tuple(p for name in names for p in PROTOCOLS if p == name)
    if not found or set(names) - set(PROTOCOLS):
        raise ConfigError(
            f"evaluate: protocols={','.join(names)!r}; expected some of {', '.join(PROTOCOLS)}. Leave it out for knn, linear."
        )
    return tuple(dict.fromkeys(found))


def checked_controls(names: Iterable[str]) -> tuple[Control, ...]:
    """The controls of these names. Raises ConfigError for an unknown one."""
    if set(names) - set(CONTROLS):
        raise ConfigError(f"evaluate: against={','.join(names)!r}; expected random, pixels, both or none. Leave it out for both.")
    return tuple(c for c in CONTROLS if c in names)


def score_features(
    train: LabelledFeatures,
    test: LabelledFeatures,
    protocols: Sequence[Protocol],
    settings: ProtocolSettings | None = None,
    visibility: Visibility = "private",
    metric: Metric = "accuracy",
    names: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
    several: SeveralLabels | None = None,
) -> list[Score]:
    """Scores for each entry of the features by the protocols that need no more than features.

    Args:
        several: classes that are right for each row of the test store; accuracy only.

    Raises:
        DataError: labels or features are not fit for a classifier.
    """
    settings = settings or ProtocolSettings()
    check_labels(train.label_N, test.label_N, names)
    label_N, truth, scores = train.label_N.numpy(), test.label_N.numpy(), []
    for protocol in protocols:
        for (name, pooling), train_ND in train.features.items():
            test_ND = test.features[name, pooling]
            for x_ND in (train_ND, test_ND):
                if not torch.isfinite(x_ND).all():
                    bad = int((~torch.isfinite(x_ND)).any(dim=1).sum())
                    raise DataError(f"evaluate: features of {name} are not finite for {bad} records; expected numbers. Train again.")
            x, y = train_ND.numpy(), test_ND.numpy()
            if protocol == "knn":
                say(f"k-NN: {name}, {pooling}")
                found = [("k-NN", f"k={settings.k}, cosine, ", [knn_predict(train_ND, train.label_N, test_ND, k=settings.k).numpy()])]
            elif protocol == "linear":
                say(f"linear probe: {name}, {pooling}")
                found = [("linear probe", "", [fit_linear_probe(x, label_N, train.unit_N).predict(y)])]
            elif protocol == "ridge":
                say(f"ridge probe: {name}, {pooling}")
                found = [("ridge probe", "", [fit_ridge(x, label_N, train.unit_N).predict(y)])]
            elif protocol == "few_shot_dpcap":
                found = []
                for k in settings.shots:
                    say(f"{k}-shot DP-Cap probe: {name}, {pooling}")
                    draws = dpcap_probe(x, label_N, y, k, settings.probe.draws, names=names)
                    found.append((f"{k}-shot DP-Cap probe", f"{settings.probe.draws} draws, ", draws))
            else:
                found = []
                for k in settings.shots:
                    say(f"{k}-shot probe: {name}, {pooling}")
                    draws = few_shot_probe(x, label_N, train.unit_N, y, k, settings.probe, names=names)
                    found.append((f"{k}-shot {settings.probe.classifier} probe", f"{settings.probe.draws} draws, ", draws))
            for title, how, predicted in found:
                told = f"{titled(title, metric)}, {how}{pooling}"
                scores.append(score_draws(name, predicted, truth, told, visibility, metric, several, test.row_N))
    return scores


def score_draws(
    name: str,
    predicted: Sequence[np.ndarray],
    truth: np.ndarray,
    how: str,
    visibility: Visibility,
    metric: Metric,
    several: SeveralLabels | None = None,
    row_N: np.ndarray | None = None,
) -> Score:
    """The mean over draws, with Student's interval over them; of a single draw, the interval over test records.

    Args:
        several: what is right for the rows ``row_N``, in the place of ``truth``.
    """
    if several is not None:
        assert row_N is not None
        return several_score(name, predicted, row_N, how, visibility, several)
    figures = [measure(p, truth, metric) for p in predicted]
    value = float(np.mean([f[0] for f in figures]))
    low, high = t_interval([f[0] for f in figures]) if len(figures) > 1 else figures[0][1:]
    return Score(name, value, low, high, len(truth), chance_level(truth, metric), how, visibility)


def only(features: LabelledFeatures, name: str) -> LabelledFeatures:
    """The features of one encoder among those of several."""
    return replace(features, features={key: x for key, x in features.features.items() if key[0] == name})
