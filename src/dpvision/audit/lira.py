"""The likelihood-ratio membership attack with few shadow models (Carlini et al. 2022, Membership
inference attacks from first principles: online, fixed variance), on heads, which are cheap to
train.

Legend: N records, S shadow models.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.fit import fit_head
from dpvision.adapt.prepare import Prepared
from dpvision.adapt.release import Releases
from dpvision.files import replacing
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.stream import Stream, new_key, subkey
from dpvision.runs.run import Secrets

SHADOWS = 16


def fair_coins(num: int) -> np.ndarray:
    """Return ``num`` fair coins, bool, from a key of their own."""
    words = Stream(subkey(new_key(), "canaries")).words(num)
    return (words >> np.uint64(63)).astype(bool)


def attack_head(
    made: Prepared,
    stream: FeatureStream,
    row_M: np.ndarray,
    kept: Path,
    say: Callable[[str, int, int], None],
) -> tuple[np.ndarray, np.ndarray]:
    """Train a head, and shadow heads of the same kind, on public features; each of the records at
    ``row_M`` is included by a coin of its own in each.

    Args:
        kept: folder of the scores and coins of each head, which is not trained again if they are
            there.
        say: shows progress, after each head that was trained.

    Returns:
        Log-likelihood ratios of the first head's scores, float64 (M,), and its coins, bool.
    """
    num = SHADOWS + 1
    for i in range(num):
        if (path := _of_head(kept, i)).exists():
            continue
        inside_M = fair_coins(len(row_M))
        rows = np.setdiff1d(np.arange(stream.num_records), row_M[~inside_M])
        score_M = label_scores(trained_head(made, stream, rows, Secrets()), stream)[row_M]
        with replacing(path) as partial, partial.open("wb") as file:
            np.save(file, np.stack([score_M, inside_M.astype(np.float64)]))
        say("black box, heads", i + 1, num)
    found = [np.load(_of_head(kept, i), allow_pickle=False) for i in range(num)]
    score_SM, inside_SM = (np.array([one[j] for one in found]) for j in range(2))
    inside_SM = inside_SM == 1
    return likelihood_ratios(score_SM[0], score_SM[1:], inside_SM[1:]), inside_SM[0]


def _of_head(kept: Path, number: int) -> Path:
    return kept / f"head-{number:02d}.npy"


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
    gets the mean over records for the side that is missing.
    """
    log_N = []
    for side_SN in (inside_SN, ~inside_SN):
        count_N = side_SN.sum(0)
        sum_N = np.where(side_SN, shadow_SN, 0.0).sum(0)
        mean_N = np.where(count_N > 0, sum_N / np.maximum(count_N, 1), sum_N.sum() / side_SN.sum())
        square = np.where(side_SN, (shadow_SN - mean_N) ** 2, 0.0).sum()
        degrees = max(1, int((count_N - 1).clip(0).sum()))
        std = max(math.sqrt(square / degrees), 1e-12)
        log_N.append(stats.norm.logpdf(score_N, mean_N, std))
    return log_N[0] - log_N[1]
