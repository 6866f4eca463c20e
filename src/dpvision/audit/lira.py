"""The likelihood-ratio membership attack with few shadow models (Carlini et al. 2022, Membership
inference attacks from first principles: online, fixed variance), on heads and networks.

Legend: N records, M canaries, S shadow models.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.fit import fit_head
from dpvision.adapt.prepare import Prepared
from dpvision.adapt.release import Releases
from dpvision.errors import CheckpointError
from dpvision.files import remove_folder, write_json
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.stream import Stream, new_key, subkey
from dpvision.runs.run import Secrets
from dpvision.strict_json import parse_json

_LARGEST = 1e100
"""In place of infinite scores, as those of weights that are not finite. Its square is finite."""


@dataclass(frozen=True)
class Scored:
    """What a trained model says of the canaries, and which of them it was trained on."""

    score_M: np.ndarray
    """float64; higher for a canary that is more likely in the data. NaN: nothing is known of it."""
    inside_M: np.ndarray
    """The coins, bool."""
    without_update: int = 0
    """Steps that were charged and then lost by a kill."""

    def write(self, path: Path) -> None:
        score = [None if math.isnan(score) else score for score in self.score_M.tolist()]
        found = {"score": score, "inside": self.inside_M.tolist()}
        write_json(path, {**found, "steps_without_update": self.without_update})

    @staticmethod
    def read(path: Path, num: int) -> "Scored":
        """Raises CheckpointError: it is not of ``num`` canaries."""
        with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            if path.is_symlink() or not path.is_file():
                raise ValueError("not a file")
            found = parse_json(path.read_bytes())
            score_M, inside_M = np.array(found["score"], float), np.array(found["inside"])
            lost = found["steps_without_update"]
            same = inside_M.dtype == bool and score_M.shape == inside_M.shape == (num,)
            sane = not (np.abs(score_M) > _LARGEST).any() and type(lost) is int and lost >= 0
            if same and sane:
                return Scored(score_M, inside_M, lost)
        raise CheckpointError(
            f"audit: {path} cannot be read; expected the coins and scores of {num} canaries. "
            f"Remove the folder {path.parent} to give this audit up."
        )


def fair_coins(num: int) -> np.ndarray:
    """Return ``num`` fair coins, bool, from a key of their own."""
    words = Stream(subkey(new_key(), "canaries")).words(num)
    return (words >> np.uint64(63)).astype(bool)


def attack(
    train: Callable[[int, Path], Scored],
    num_canaries: int,
    shadows: int,
    kept: Path,
    trained: Callable[[int], None] = lambda number: None,
) -> Scored:
    """Train a model, and ``shadows`` models in the same way, and score the first one's canaries.

    Args:
        train: trains a model by its number, with fair coins of its own, and scores its canaries. It
            may keep what it needs to go on, if it is stopped, in the folder that it is given, which
            is not there at first.
        kept: folder of the scores and coins of each model. A model whose file is there is not
            trained again.
        trained: called with a model's number after it was trained and its file was written.

    Returns:
        The first model's coins and log-likelihood ratios, without shadow models its own scores; the
        steps that were lost are of all models.
    """
    paths = [kept / f"model-{i:02d}.json" for i in range(shadows + 1)]
    models = []
    for i, path in enumerate(paths):
        folder = path.with_suffix("")
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise CheckpointError(
                f"audit: {folder} is no folder; expected that of a model. Remove the folder {kept} "
                "to give this audit up."
            )
        if not path.exists() and any(later.exists() for later in paths[i + 1 :]):
            raise CheckpointError(
                f"audit: {path} is missing, and later models are there; expected all of them. "
                f"Remove the folder {kept} to give this audit up."
            )
        if not path.exists():
            made = train(i, folder)
            replace(made, score_M=made.score_M.clip(-_LARGEST, _LARGEST)).write(path)
            trained(i)
        if i and folder.exists():
            remove_folder(folder)
        models.append(Scored.read(path, num_canaries))
    first, rest = models[0], models[1:]
    score_M = first.score_M
    if rest:
        score_SM = np.array([m.score_M for m in rest])
        score_SM[np.abs(score_SM) == _LARGEST] = math.nan
        score_M = likelihood_ratios(score_M, score_SM, np.array([m.inside_M for m in rest]))
    lost = sum(m.without_update for m in models)
    return Scored(np.nan_to_num(score_M, nan=0.0), first.inside_M, lost)


def score_head(made: Prepared, stream: FeatureStream, row_M: np.ndarray) -> Scored:
    """Train a head on public features, with each of the records at ``row_M`` included by a coin of
    its own, and score them.
    """
    inside_M = fair_coins(len(row_M))
    rows = np.setdiff1d(np.arange(stream.num_records), row_M[~inside_M])
    head = trained_head(made, stream, rows, Secrets())
    return Scored(label_scores(head, stream)[row_M], inside_M)


def trained_head(made: Prepared, stream: FeatureStream, rows: np.ndarray, secrets: Secrets) -> Head:
    """Return the head that ``dpvision adapt`` trains on some rows (sorted) of public features.
    Nothing is charged.
    """
    part = replace(stream, feature_ND=stream.feature_ND[rows], label=stream.label[rows])
    plan = DPPlan.from_dict(made.plan.to_dict())  # one object plans one run
    plan.require_true()
    steps = iter(range(plan.steps))
    releases = Releases(plan, lambda: next(steps), secrets.draw, secrets.noise)
    return fit_head(made.config, part, releases).head


def label_scores(head: Head, stream: FeatureStream) -> np.ndarray:
    """Return log p - log(1 - p) of each record's own label (equation 6), float64 (N,). With several
    labels, the mean of the same over the classes.
    """
    score_NK = head.scores(torch.from_numpy(np.array(stream.feature_ND)).float()).double()
    label = torch.from_numpy(np.array(stream.label))
    if stream.multi_label:
        return (score_NK * (2 * label.double() - 1)).mean(1).numpy()
    own_N1 = label.long()[:, None]
    rest_NK = score_NK.scatter(1, own_N1, -math.inf)
    return (score_NK.gather(1, own_N1)[:, 0] - rest_NK.logsumexp(1)).numpy()


def likelihood_ratios(
    score_N: np.ndarray, shadow_SN: np.ndarray, inside_SN: np.ndarray
) -> np.ndarray:
    """Return log(normal density with the record / without it) of each score, float64 (N,).

    Each record has its own two means over the shadow models; one standard deviation is shared by
    all records with their coins up, one by all without. A record that all or no shadow models have
    gets its missing mean from the other one, by the mean difference of the records that have both.

    Args:
        shadow_SN: scores by the shadow models; NaN is left out. Where no record has both means, all
            ratios are 0.
    """
    known_SN = ~np.isnan(shadow_SN)
    sides = [(known_SN & side_SN) for side_SN in (inside_SN, ~inside_SN)]
    count_N, outs_N = (side_SN.sum(0) for side_SN in sides)
    in_N, out_N = (
        np.where(side_SN, shadow_SN, 0.0).sum(0) / np.maximum(side_SN.sum(0), 1)
        for side_SN in sides
    )
    both_N = (count_N > 0) & (outs_N > 0)
    if not both_N.any():
        return np.zeros(len(score_N))
    gap = (in_N - out_N)[both_N].mean()
    mean = [np.where(count_N > 0, in_N, out_N + gap), np.where(outs_N > 0, out_N, in_N - gap)]
    log_N = []
    for side_SN, mean_N in zip(sides, mean, strict=True):
        square = np.where(side_SN, (shadow_SN - mean_N) ** 2, 0.0).sum()
        degrees = max(1, int((side_SN.sum(0) - 1).clip(0).sum()))
        log_N.append(stats.norm.logpdf(score_N, mean_N, max(math.sqrt(square / degrees), 1e-12)))
    return np.where((count_N + outs_N) > 0, log_N[0] - log_N[1], 0.0)
