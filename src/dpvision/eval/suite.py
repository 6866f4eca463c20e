"""The score of a run: k-NN and linear probe on frozen features, with raw pixels and random weights always beside the encoder.

Legend: N records, D numbers of a feature.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from dpvision.checkpoint import load_checkpoint, write_json
from dpvision.data.keys import StepKey
from dpvision.data.store import Store
from dpvision.errors import CheckpointError, ConfigError, DataError
from dpvision.eval.baselines import raw_pixels
from dpvision.eval.knn import knn_predict
from dpvision.eval.linear_probe import fit_linear_probe
from dpvision.eval.score import Score, wilson_interval
from dpvision.features import FeatureFunction, Progress, collect_features, initial_encoder, load_encoder, trained_in_confidence
from dpvision.train.folder import run_base

Protocol = Literal["knn", "linear"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
TEST_FRACTION = 0.2
"""Expected share of the units of a single store that are kept for the test."""


@dataclass(frozen=True)
class LabelledFeatures:
    """Features of the labelled records of one store, by (function's name, feature's name)."""

    features: dict[tuple[str, str], Tensor]
    """float32 (N, D) each."""
    label_N: Tensor
    unit_N: np.ndarray
    """Records of one person share a number."""


def evaluate(
    run_or_checkpoint: str | Path,
    train_store: Store,
    test_store: Store | None = None,
    *,
    protocols: tuple[Protocol, ...] = PROTOCOLS,
    ema: bool = False,
    k: int = 20,
    batch_size: int = 256,
    workers: int = 2,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> list[Score]:
    """Scores of the run's encoder, of the same architecture with the run's initial random weights, and of raw pixels.

    Each protocol is run on both poolings of the tokens ("mean" and "2x2", see ``features.Encoder``).

    Args:
        train_store: labelled pictures to learn the classes from.
        test_store: labelled pictures to score on; None: about a fifth of the first store's units, the same ones every time.
        progress: called with the number of pictures done, over both stores.

    Returns:
        One Score for each of {encoder, random weights} x poolings and for raw pixels, for each protocol. They are private if a store
        is, or if the encoder was trained on private pictures without a guarantee.

    Raises:
        ConfigError: unknown protocol, or ``k`` below 1.
        DataError: a store has no labels, one class only, or labels that the training store lacks; the stores share records; a feature is
            not finite.
        CheckpointError: as in ``features.load``.
    """
    if not k >= 1:
        raise ConfigError(f"evaluate: k={k!r}; expected at least 1 neighbour. Use 20.")
    if not protocols or set(protocols) - set(PROTOCOLS):
        raise ConfigError(f"evaluate: protocols={protocols!r}; expected some of {list(PROTOCOLS)}. Leave it out for both.")
    checkpoint = load_checkpoint(run_or_checkpoint)
    encoder, config = load_encoder(checkpoint, ema=ema)
    untrained = initial_encoder(config.model, config.seed)
    name = "encoder, averaged weights" if ema else "encoder"
    functions: dict[str, FeatureFunction] = {
        name: encoder.to(device).poolings,
        "random weights": untrained.to(device).poolings,
        "raw pixels": raw_pixels,
    }
    private = "private" in (train_store.visibility, test_store.visibility if test_store else "public")
    private = private or trained_in_confidence(checkpoint.manifest)
    train_rows, test_rows = evaluation_rows(train_store, test_store)
    size, data = config.model.encoder.image_size, config.data

    def labelled(store: Store, rows: np.ndarray, done_before: int) -> LabelledFeatures:
        report = (lambda done: progress(done_before + done)) if progress is not None else None
        features, label_N, row_N = collect_features(
            functions,
            store,
            data,
            size,
            rows=rows,
            batch_size=batch_size,
            workers=workers,
            device=device,
            progress=report,
        )
        return LabelledFeatures(features, label_N, units(store)[row_N.numpy()])

    train = labelled(train_store, train_rows, 0)
    test = labelled(test_store or train_store, test_rows, len(train_rows))
    return score_features(train, test, protocols, k, "private" if private else "public")


def score_features(
    train: LabelledFeatures, test: LabelledFeatures, protocols: tuple[Protocol, ...], k: int, visibility: Literal["private", "public"]
) -> list[Score]:
    """One Score for each protocol and each entry of the features.

    Raises:
        DataError: labels or features are not fit for a classifier.
    """
    check_labels(train.label_N, test.label_N)
    truth = test.label_N.numpy()
    chance = float(np.bincount(truth).max() / len(truth))
    scores = []
    for protocol in protocols:
        for (name, pooling), train_ND in train.features.items():
            test_ND = test.features[name, pooling]
            for x_ND in (train_ND, test_ND):
                if not torch.isfinite(x_ND).all():
                    bad = int((~torch.isfinite(x_ND)).any(dim=1).sum())
                    raise DataError(f"evaluate: features of {name} are not finite for {bad} records; expected numbers. Train again.")
            if protocol == "knn":
                predicted = knn_predict(train_ND, train.label_N, test_ND, k=k).numpy()
                how = f"k-NN, k={k}, cosine, {pooling}"
            else:
                predicted = fit_linear_probe(train_ND.numpy(), train.label_N.numpy(), train.unit_N).predict(test_ND.numpy())
                how = f"linear probe, {pooling}"
            correct, n = int((predicted == truth).sum()), len(truth)
            scores.append(Score(name, correct / n, *wilson_interval(correct, n), n, chance, how, visibility))
    return scores


def check_labels(train_label_N: Tensor, test_label_N: Tensor) -> None:
    """Raise DataError unless the training labels have two classes or more and cover those of the test."""
    known, asked = set(train_label_N.tolist()), set(test_label_N.tolist())
    if len(known) < 2:
        raise DataError(f"evaluate: {len(known)} class among the training labels; expected two or more. Add pictures of another class.")
    if asked - known:
        raise DataError(
            f"evaluate: the test store has labels {sorted(asked - known)[:5]} that the training store lacks; expected the same classes. "
            "Import both with the same --label-from and the same class folders."
        )


def evaluation_rows(train_store: Store, test_store: Store | None) -> tuple[np.ndarray, np.ndarray]:
    """Labelled rows to train and to test on; one store is split by units with keyed coins, as ``data split`` does.

    Raises:
        DataError: a store has no labels, their classes have other names, they share records, or one is too small to split.
    """
    train_rows = _labelled_rows(train_store)
    if test_store is None:
        coin_N = StepKey(0, 0).uniform_numpy(units(train_store)[train_rows], "evaluation test", 1)[:, 0]
        train_part, test_part = train_rows[coin_N >= TEST_FRACTION], train_rows[coin_N < TEST_FRACTION]
        if not len(train_part) or not len(test_part):
            raise DataError(f"evaluate: {train_store.path} has {len(train_rows)} labelled records; expected more. Give a test store.")
        return train_part, test_part
    names, test_names = train_store.label_names, test_store.label_names
    if names is not None and test_names is not None and names != test_names:
        raise DataError(
            f"evaluate: classes of the stores differ ({names[:3]}... and {test_names[:3]}...); expected the same names in the same order. "
            "Import both with the same --label-from and the same class folders."
        )
    # Two halves of one store may be given, the same records twice may not. Ids of different stores do not tell (they are keyed).
    same = train_store.store_id == test_store.store_id
    if same and len(np.intersect1d(train_store.index["id"], test_store.index["id"])):
        raise DataError(f"evaluate: {test_store.path} shares records with the training store. Give one store only, and it is split.")
    return train_rows, _labelled_rows(test_store)


def units(store: Store) -> np.ndarray:
    """int64 (N,): the unit of each record, its own id where it has none."""
    return np.where(store.index["unit"] >= 0, store.index["unit"], store.index["id"]).astype(np.int64)


def _labelled_rows(store: Store) -> np.ndarray:
    rows = np.flatnonzero(store.labels >= 0)
    if not len(rows):
        raise DataError(f"evaluate: {store.path} has no labels; expected a class for each picture. Import it with --label-from FIELD.")
    return rows


def write_scores(run_dir: str | Path, scores: list[Score], *, train_data: str, test_data: str) -> list[Path]:
    """Merge scores into the run's scores.json, private ones into confidential/scores.json.

    An entry is replaced by a new one of the same (name, protocol, train_data, test_data).

    Args:
        train_data, test_data: names of the stores, e.g. of their folders.

    Returns:
        The files written.

    Raises:
        CheckpointError: ``run_dir`` holds no run, or a file there cannot be read or written.
    """
    root = Path(run_dir)
    base = run_base(root)
    if base is None:
        raise CheckpointError(f"scores: {root} holds no run; expected a run folder. Correct the path.")
    written = []
    for visibility, folder in (("public", base), ("private", root / "confidential")):
        new = [s.to_dict() | {"train_data": train_data, "test_data": test_data} for s in scores if s.visibility == visibility]
        if new:
            path = folder / "scores.json"
            merged = {_key(entry): entry for entry in [*read_scores(path), *new]}
            write_json(path, list(merged.values()))
            written.append(path)
    return written


def read_scores(path: Path) -> list[dict]:
    """Entries of a scores.json (fields of Score, train_data, test_data); none when there is no file.

    Raises:
        CheckpointError: the file is not what ``write_scores`` wrote.
    """
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text())
        for entry in entries:
            _key(entry)
        return entries
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"scores: {path} cannot be read ({error!r}). Move it away and evaluate again.") from None


def _key(entry: dict) -> tuple[str, str, str, str]:
    return entry["name"], entry["protocol"], entry["train_data"], entry["test_data"]
