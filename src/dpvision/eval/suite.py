"""The scores of an encoder, whoever made it: one protocol after the other, with random weights and raw pixels always beside it.

Legend: N records, D numbers of a feature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpvision.data import decode, loader, transform
from dpvision.data.store import Store
from dpvision.encoders.base import FrozenEncoder
from dpvision.encoders.feature_cache import FeatureCache, code_digest, features_key, score_key
from dpvision.encoders.fixed import raw_pixels
from dpvision.encoders.identity import fingerprint
from dpvision.encoders.open import open_encoder, recognised
from dpvision.errors import ConfigError, DataError
from dpvision.eval import dpcap_probe, few_shot, fine_tune, knn, lars_probe, linear_probe, metric, ridge
from dpvision.eval import protocols as protocol_code
from dpvision.eval.lars_probe import token_features
from dpvision.eval.metric import Metric, checked_metric, titled
from dpvision.eval.own_head import score_own_head
from dpvision.eval.protocols import (
    CONTROLS,
    DEFAULT_PROTOCOLS,
    ON_FEATURES,
    Control,
    Protocol,
    ProtocolSettings,
    Visibility,
    checked_controls,
    checked_protocols,
    only,
    score_draws,
    score_features,
)
from dpvision.eval.records import LabelledFeatures, check_labels, evaluation_rows, units
from dpvision.eval.score import Score
from dpvision.eval.score_file import read_scores as read_scores
from dpvision.eval.score_file import write_scores as write_scores
from dpvision.eval.several_labels import SeveralLabels
from dpvision.features import collect_features

_ROW = "row"
"""Under which the cache keeps the rows beside their features."""


def evaluate(
    spec: str | Path,
    train_store: Store,
    test_store: Store | None = None,
    *,
    protocols: Sequence[Protocol] = DEFAULT_PROTOCOLS,
    against: Sequence[Control] = CONTROLS,
    settings: ProtocolSettings | None = None,
    ema: bool = False,
    batch_size: int = 256,
    workers: int = 2,
    device: str | torch.device = "cpu",
    cache: bool = False,
    progress: Callable[[str], None] | None = None,
    several: SeveralLabels | None = None,
) -> list[Score]:
    """Scores of an encoder and of its controls: its architecture with the run's initial random weights, and raw pixels.

    Protocols on features are run on every pooling that the encoder offers; controls go through each protocol that they can.

    Args:
        spec: what ``encoders.open.open_encoder`` takes: a run folder, ``timm:NAME``, ``hog``, ...
        train_store: labelled pictures to learn the classes from.
        test_store: labelled pictures to score on; None: about a fifth of the first store's units, the same ones every time.
        against: controls. "random" exists for runs only and is left out for other encoders.
        cache: keep features and scores under the stores' confidential/features/, and take them from there.
        progress: called with a line on what is being done.
        several: the classes that are right for each record of the test store (of the only store where there is one).

    Returns:
        Scores by protocol, the encoder before its controls. They are private if a store is, or if the encoder was trained on private
        pictures without a guarantee.

    Raises:
        ConfigError: unknown protocol or control, or a protocol that this encoder cannot go through.
        DataError: a store has no labels, one class only, or labels that the training store lacks; too few pictures of a class for the
            shots; the stores share records; a feature is not finite.
        CheckpointError: the encoder cannot be read.
    """
    checked_protocols(protocols), checked_controls(against)
    settings = settings or ProtocolSettings()
    train_rows, test_rows = evaluation_rows(train_store, test_store)
    scored_store = test_store or train_store
    train_labels, test_labels = (torch.from_numpy(s.labels[r]) for s, r in ((train_store, train_rows), (scored_store, test_rows)))
    check_labels(train_labels, test_labels, train_store.label_names)
    encoder = recognised(open_encoder(str(spec), ema=ema, device=device), train_store, scored_store)
    for protocol in protocols:
        _check_fits(encoder, protocol, spec, test_store)
    encoders = [encoder]
    if "random" in against and is_run(spec):
        encoders.append(open_encoder(f"random:{spec}", device=device))
    if "pixels" in against:
        name, none = "raw pixels", None
        encoders.append(
            replace(encoder, name=name, poolings=raw_pixels, family="fixed", backbone=none, blocks=none, lineage=(), own_sizes=())
        )
    private = encoder.confidential or "private" in (train_store.results_visibility, scored_store.results_visibility)
    bench = _Bench(
        (train_store, train_rows), (scored_store, test_rows), settings, "private" if private else "public",
        "accuracy" if several is not None else checked_metric(settings.metric or train_store.meta.get("metric") or "accuracy"),
        batch_size, workers, device, progress or (lambda text: None), cache, several,
    )  # fmt: skip
    pairs = [(p, e) for p in protocols if p != "own_head" for e in encoders if e is encoder or _fits(e, p)]
    prints = {e.name: bench.fingerprint(e) for e in encoders}
    scores = {(p, e.name): bench.kept(p, prints[e.name]) for p, e in pairs}
    missing = [e for e in encoders if any(scores[p, e.name] is None for p, other in pairs if other is e and p in ON_FEATURES)]
    train, test = bench.features(missing, prints) if missing else (None, None)
    for protocol, e in pairs:
        if scores[protocol, e.name] is None:
            found = bench.score(protocol, e, train, test)
            bench.keep(protocol, prints[e.name], found)
            scores[protocol, e.name] = found
    result = [score for p, e in pairs for score in scores[p, e.name] or ()]
    if "own_head" in protocols:
        assert test_store is not None
        result += _own_head(spec, test_store, ema, batch_size, workers, device, bench.say, several)
    return result


def is_run(spec: str | Path) -> bool:
    """Whether ``spec`` is a run or checkpoint folder, as opposed to the name of some other encoder."""
    return Path(spec).is_dir()


def _fits(encoder: FrozenEncoder, protocol: Protocol) -> bool:
    if protocol == "linear_cls":
        return encoder.blocks is not None
    return protocol != "few_shot" or encoder.backbone is not None


def _check_fits(encoder: FrozenEncoder, protocol: Protocol, spec: str | Path, test_store: Store | None) -> None:
    """Say what an encoder cannot go through before any work is done."""
    if protocol == "linear_cls":
        token_features(encoder, "cls")
    elif protocol == "few_shot" and encoder.backbone is None:
        raise ConfigError(f"few_shot: {encoder.name} has nothing to train; expected a network. Use --protocols few_shot_probe.")
    elif protocol == "own_head" and not is_run(spec):
        raise ConfigError(f"own_head: {str(spec)!r} has no head; expected the run folder of a classifier. Use --protocols linear.")
    elif protocol == "own_head" and test_store is None:
        raise ConfigError("own_head: no test store; expected --test STORE, pictures that the head was not trained on. Name one.")


def _own_head(
    spec: str | Path,
    test_store: Store,
    ema: bool,
    batch_size: int,
    workers: int,
    device: str | torch.device,
    say: Callable[[str], None],
    several: SeveralLabels | None,
) -> list[Score]:
    def report(done: int) -> None:
        say(f"own head: {done:,} test pictures")

    return score_own_head(
        spec, test_store, ema=ema, batch_size=batch_size, workers=workers, device=device, progress=report, several_labels=several
    )


@dataclass(frozen=True)
class _Bench:
    """Two stores with everything that an encoder is measured by on them."""

    train: tuple[Store, np.ndarray]
    test: tuple[Store, np.ndarray]
    settings: ProtocolSettings
    visibility: Visibility
    metric: Metric
    batch_size: int
    workers: int
    device: str | torch.device
    say: Callable[[str], None]
    cache: bool
    several: SeveralLabels | None = None

    def fingerprint(self, encoder: FrozenEncoder) -> str | None:
        """What the cache knows an encoder by; None: its results are not kept."""
        # What a confidential encoder makes of public pictures is private, and the public store's folder is not the place for it.
        stays = not encoder.confidential or {self.train[0].visibility, self.test[0].visibility} == {"private"}
        return fingerprint(encoder, self.device) if self.cache and stays else None

    def features(self, encoders: list[FrozenEncoder], prints: dict[str, str | None]) -> tuple[LabelledFeatures, LabelledFeatures]:
        """Features of the training and of the test records by all encoders, each store read once at most."""
        return self._of_store(self.train, encoders, prints, "training"), self._of_store(self.test, encoders, prints, "test")

    def _of_store(
        self, part: tuple[Store, np.ndarray], encoders: list[FrozenEncoder], prints: dict[str, str | None], name: str
    ) -> LabelledFeatures:
        (store, rows), cache = part, FeatureCache(part[0].path)
        keys = {e.name: features_key(mark, store, rows) for e in encoders if (mark := prints[e.name]) is not None}
        kept = {encoder: cache.load(key) for encoder, key in keys.items()}
        found = {(e.name, pooling): x for e in encoders for pooling, x in (kept.get(e.name) or {}).items() if pooling != _ROW}
        row_N = next((tensors[_ROW] for tensors in kept.values() if tensors is not None), None)
        new = [e for e in encoders if kept.get(e.name) is None]
        for data in dict.fromkeys(e.data for e in new):  # one pass for all encoders whose images are prepared alike
            alike = [e for e in new if e.data == data]
            computed, _, row_N = collect_features(
                {e.name: e.poolings for e in alike}, store, data, alike[0].image_size, rows=rows,
                batch_size=self.batch_size, workers=self.workers, device=self.device,
                progress=lambda n: self.say(f"features of {name} pictures: {n:,} of {len(rows):,}"),
            )  # fmt: skip
            found |= computed
            for e in alike:
                if e.name in keys:
                    own = {pooling: x for (encoder, pooling), x in computed.items() if encoder == e.name}
                    cache.save(keys[e.name], own | {_ROW: row_N})
        assert row_N is not None
        row = row_N.numpy()
        return LabelledFeatures(found, torch.from_numpy(store.labels[row]), units(store)[row], row)

    def score(
        self, protocol: Protocol, encoder: FrozenEncoder, train: LabelledFeatures | None, test: LabelledFeatures | None
    ) -> list[Score]:
        """Scores of one encoder by one protocol."""
        if protocol in ON_FEATURES:
            assert train is not None and test is not None
            train, test = only(train, encoder.name), only(test, encoder.name)
            return score_features(
                train, test, (protocol,), self.settings, self.visibility, self.metric, self.train[0].label_names, self.say, self.several
            )
        unit_N = units(self.train[0])[self.train[1]]
        shared: dict[str, Any] = {"batch_size": self.batch_size, "workers": self.workers, "device": self.device, "progress": self.say}
        if protocol == "few_shot":
            scores = []
            for k in self.settings.shots:
                tuned = fine_tune.fine_tune(encoder, self.train, self.test, unit_N, k, self.settings.tune, **shared)
                how = f"{titled(f'{k}-shot fine-tuning', self.metric)}, {self.settings.tune.words(encoder, k)}"
                scores.append(self._drawn(encoder, tuned.predicted, tuned.label_M, tuned.row_M, how))
            return scores
        tokens: lars_probe.Tokens = "cls" if protocol == "linear_cls" else "blocks"
        feature_of, what = token_features(encoder, tokens, self.settings.lars.num_blocks)
        lars = self.settings.lars
        probed = lars_probe.lars_probe(feature_of, self.train, self.test, unit_N, encoder.data, encoder.image_size, lars, **shared)
        how = f"{titled('LARS probe', self.metric)}, {lars.words(len(self.train[1]))}, {what}"
        return [self._drawn(encoder, [probed.predicted_M], probed.label_M, probed.row_M, how)]

    def _drawn(self, encoder: FrozenEncoder, predicted: list[np.ndarray], label_M: np.ndarray, row_M: np.ndarray, how: str) -> Score:
        return score_draws(encoder.name, predicted, label_M, how, self.visibility, self.metric, self.several, row_M)

    def kept(self, protocol: Protocol, mark: str | None) -> list[Score] | None:
        """Scores that an earlier evaluation left."""
        entries = None if mark is None else self._score_cache.load_json(self._key(protocol, mark))
        try:
            return None if entries is None else [replace(Score.from_dict(entry), visibility=self.visibility) for entry in entries]
        except (DataError, TypeError):
            return None

    def keep(self, protocol: Protocol, mark: str | None, scores: list[Score]) -> None:
        """Leave scores to the next evaluation."""
        if mark is not None:
            self._score_cache.save_json(self._key(protocol, mark), [score.to_dict() for score in scores])

    @property
    def _score_cache(self) -> FeatureCache:
        (train, _), (test, _) = self.train, self.test
        return FeatureCache((test if test.results_visibility == "private" else train).path)

    def _key(self, protocol: Protocol, mark: str) -> str:
        s = self.settings
        knobs = {
            "knn": s.k, "few_shot_probe": [s.shots, repr(s.probe)], "few_shot_dpcap": [s.shots, s.probe.draws],
            "few_shot": [s.shots, repr(s.tune)], "linear_lars": repr(s.lars), "linear_cls": repr(s.lars),
        }.get(protocol)  # fmt: skip
        stores = [features_key(mark, *part) for part in (self.train, self.test)]
        labels = [store.labels[rows].tolist() for store, rows in (self.train, self.test)]
        code = code_digest(
            decode, loader, transform, dpcap_probe, few_shot, fine_tune, knn, lars_probe, linear_probe, metric, protocol_code, ridge
        )
        beside = [] if self.several is None else [self.several.name, self.several.digest()]
        return score_key(protocol, knobs, self.metric, stores, labels, code, *beside)
