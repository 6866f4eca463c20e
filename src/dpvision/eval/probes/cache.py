"""A cache of features and scores of evaluations.

A cached score's key includes the encoder, both stores' rows and labels, the protocol with its
settings, the metric, ``SCORES_VERSION``, and the versions of the libraries that compute it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import numpy as np
import torch

from dpvision.data.store import Store
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.feature_cache import FeatureCache, features_key, score_key
from dpvision.encoders.feature_file import collect_features
from dpvision.encoders.identity import fingerprint
from dpvision.errors import DataError
from dpvision.eval.probes.protocol import Protocol, Task
from dpvision.eval.probes.records import LabelledFeatures, units
from dpvision.eval.score import Score

SCORES_VERSION = 1
"""Raise it with every change of a protocol, a metric or an interval that changes scores: those kept
before are then computed again. tests/eval/probes/test_scores_version.py reminds you.
"""
_LIBRARIES = ("numpy", "scikit-learn", "scipy", "timm", "torch", "torchvision")
_ROW = "row"
"""Entry of a cached file with the features' rows."""


@dataclass(frozen=True)
class EvaluationCache:
    """The cache of one task, under the stores' confidential/features/."""

    task: Task
    enabled: bool

    def fingerprint(self, encoder: Encoder) -> str | None:
        """Return the cache's identifier of an encoder, or None if its results are not cached."""
        (train, _), (test, _) = self.task.train, self.task.test
        # Features of public images by a confidential encoder are private and must not be in a
        # public store's folder.
        stays = not encoder.confidential or {train.visibility, test.visibility} == {"private"}
        return fingerprint(encoder, self.task.device) if self.enabled and stays else None

    def features(
        self, encoders: Sequence[Encoder], prints: dict[str, str | None]
    ) -> tuple[LabelledFeatures, LabelledFeatures]:
        """Return the features of the training and test records by all encoders, reading each store
        at most once.
        """
        return self._of_store(self.task.train, encoders, prints, "training"), self._of_store(
            self.task.test, encoders, prints, "test"
        )

    def _of_store(
        self,
        part: tuple[Store, np.ndarray],
        encoders: Sequence[Encoder],
        prints: dict[str, str | None],
        name: str,
    ) -> LabelledFeatures:
        (store, rows), task, cache = part, self.task, FeatureCache(part[0].path)
        keys = {
            e.name: features_key(mark, store, rows)
            for e in encoders
            if (mark := prints[e.name]) is not None
        }
        kept = {encoder: cache.load(key) for encoder, key in keys.items()}
        found = {
            (e.name, pooling): x
            for e in encoders
            for pooling, x in (kept.get(e.name) or {}).items()
            if pooling != _ROW
        }
        row_N = next((tensors[_ROW] for tensors in kept.values() if tensors is not None), None)
        new = [e for e in encoders if kept.get(e.name) is None]
        for data in dict.fromkeys(
            e.data for e in new
        ):  # one pass for all encoders with the same preprocessing
            alike = [e for e in new if e.data == data]
            computed, _, row_N = collect_features(
                {e.name: e.poolings for e in alike},
                store,
                data,
                alike[0].image_size,
                rows=rows,
                batch_size=task.batch_size,
                workers=task.workers,
                device=task.device,
                progress=lambda n: task.count(f"features of {name} images", n, len(rows)),
            )
            found |= computed
            for e in alike:
                if e.name in keys:
                    own = {
                        pooling: x
                        for (encoder, pooling), x in computed.items()
                        if encoder == e.name
                    }
                    cache.save(keys[e.name], own | {_ROW: row_N})
        assert row_N is not None
        row = row_N.numpy()
        return LabelledFeatures(found, torch.from_numpy(store.labels[row]), units(store)[row], row)

    def load(self, protocol: Protocol, mark: str | None) -> list[Score] | None:
        """Return the cached scores of an earlier evaluation, or None."""
        entries = None if mark is None else self._scores.load_json(self._key(protocol, mark))
        try:
            return (
                None
                if entries is None
                else [
                    replace(Score.from_dict(e), visibility=self.task.scoring.visibility)
                    for e in entries
                ]
            )
        except (DataError, TypeError):
            return None

    def save(self, protocol: Protocol, mark: str | None, scores: list[Score]) -> None:
        """Cache scores for later evaluations."""
        if mark is not None:
            self._scores.save_json(self._key(protocol, mark), [score.to_dict() for score in scores])

    @property
    def _scores(self) -> FeatureCache:
        (train, _), (test, _) = self.task.train, self.task.test
        return FeatureCache((test if test.results_visibility == "private" else train).path)

    def _key(self, asked: Protocol, mark: str) -> str:
        parts, scoring = (self.task.train, self.task.test), self.task.scoring
        stores = [features_key(mark, *part) for part in parts]
        labels = [store.labels[rows].tolist() for store, rows in parts]
        libraries = [version(name) for name in _LIBRARIES]
        any_of = [] if scoring.any_of is None else [scoring.any_of.name, scoring.any_of.digest()]
        seed = [] if asked.seed == 0 else [asked.seed]
        return score_key(
            repr(asked), scoring.metric, stores, labels, SCORES_VERSION, libraries, *any_of, *seed
        )
