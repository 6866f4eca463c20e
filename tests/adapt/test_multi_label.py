"""Heads on a store with several labels a record: what they are fitted to, how they are scored, what
is refused.
"""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score

from dpvision.adapt.prepare import prepare
from dpvision.adapt.session import adapt, new_head_session
from dpvision.config import HeadConfig, RunConfig, from_dict, to_dict
from dpvision.config.resolve import with_head
from dpvision.data.importer import import_samples
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.encoders.classifier import load_classifier
from dpvision.errors import ConfigError, DataError
from dpvision.eval.probes.own_head import score_own_head
from dpvision.privacy.ledger_format import read_ledger

from .runs_of_heads import head_config, write_digits

NUM_CLASSES = 12
"""The ten digits, "even", and "below three"."""


def classes_of(digit: int) -> list[int]:
    return (
        [digit, *([10] if digit % 2 == 0 else []), *([11] if digit < 3 else [])]
        if digit != 9
        else []
    )


def write_several(path: Path, start: int, stop: int, *, public: bool = False) -> Store:
    """scikit-learn's digits with several labels; a nine has none of the classes."""
    digits, samples = load_digits(), []
    for i in range(start, stop):
        file = io.BytesIO()
        Image.fromarray((digits.images[i] * 15.9).astype(np.uint8)).convert("RGB").save(file, "PNG")
        samples.append(
            Sample(f"k{i}", file.getvalue(), {"label": classes_of(int(digits.target[i]))})
        )
    return import_samples(samples, path, public=public)


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_several(tmp_path_factory.mktemp("stores") / "private", 0, 900)


@pytest.fixture(scope="module")
def public_test(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_several(tmp_path_factory.mktemp("stores") / "test", 900, 1300, public=True)


def several_config(store: Store, head: str | None, epsilon: float | None = 4.0) -> RunConfig:
    config = head_config(store, epsilon=epsilon)
    assert isinstance(config.model, HeadConfig)
    config = replace(config, model=replace(config.model, num_classes=NUM_CLASSES, multi_label=True))
    return config if head is None else with_head(config, head)


def test_a_head_is_fitted_to_the_sets_of_the_store(private: Store) -> None:
    made = prepare(several_config(private, "least_squares"))
    target = load_digits().target[:900]
    digit = {f"k{i}": int(target[i]) for i in range(900)}
    slow = [
        [int(k in classes_of(digit[private.record(row).key])) for k in range(NUM_CLASSES)]
        for row in made.row_N.tolist()
    ]
    assert made.label.tolist() == slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "threshold"),
    [
        ("one_step", None),
        ("many_steps", 0.0),
        ("least_squares", 0.5),
        ("prototypes", None),
        (None, 0.0),
    ],
)
def test_every_head_is_scored_by_the_order_of_its_answers_and_by_its_decisions_where_it_makes_some(
    private: Store,
    public_test: Store,
    tmp_path: Path,
    head: str | None,
    threshold: float | None,
) -> None:
    with new_head_session(several_config(private, head), tmp_path / "run") as session:
        adapt(session)
        chosen, steps = session.prepared.model.head, session.plan.steps
    assert head is not None or chosen == "many_steps", "for which this test knows the threshold"
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").steps == steps
    classifier = load_classifier(tmp_path / "run")
    images = [
        Image.open(io.BytesIO(public_test.read(row))) for row in range(public_test.num_records)
    ]
    with torch.no_grad():
        said = classifier(
            torch.from_numpy(np.stack([classifier.preprocess(image) for image in images]))
        ).numpy()
    truth = public_test.targets(np.arange(public_test.num_records), NUM_CLASSES)
    had = truth.any(axis=0)
    assert not had[9] and had.sum() == NUM_CLASSES - 1
    precision, *decisions = score_own_head(tmp_path / "run", public_test, workers=1)
    assert precision.value == pytest.approx(
        average_precision_score(truth[:, had], said[:, had], average="macro"), abs=1e-6
    )
    assert precision.value > precision.chance + 0.1 and precision.visibility == "public"
    if threshold is None:
        assert not decisions, "scores of this head mean an order only"
    else:
        assert decisions[0].value == pytest.approx(((said > threshold) == truth).mean(), abs=1e-6)


def test_least_squares_without_noise_decides_well(
    private: Store, public_test: Store, tmp_path: Path
) -> None:
    with new_head_session(
        several_config(private, "least_squares", epsilon=None), tmp_path / "run"
    ) as session:
        adapt(session)
    _, decisions = score_own_head(tmp_path / "run", public_test, workers=1)
    assert decisions.low > decisions.chance + 0.03


def test_stores_and_heads_that_do_not_fit_are_refused(private: Store, tmp_path: Path) -> None:
    single = write_digits(tmp_path / "single", 0, 300)
    with pytest.raises(
        DataError, match="several labels a record; expected one with multi_label=False"
    ):
        prepare(head_config(private, "prototypes"))
    with pytest.raises(
        DataError, match="one label a record; expected several with multi_label=True"
    ):
        prepare(several_config(single, "prototypes"))
    with pytest.raises(
        DataError, match=r"label=11 in .* records is outside the range; expected 0 to 10"
    ):
        config = several_config(private, "prototypes")
        prepare(replace(config, model=replace(config.model, num_classes=11)))
    with pytest.raises(ConfigError, match="loss='softmax'; expected 'sigmoid' with multi_label"):
        several_config(private, "feature_covariance")


def test_configs_from_when_labels_stood_in_a_file_are_read_where_they_had_none(
    private: Store,
) -> None:
    config = head_config(private, "prototypes")
    kept = to_dict(config)
    kept["model"]["labels"] = None
    assert from_dict(RunConfig, kept) == config
    kept["model"]["labels"] = "labels.json"
    with pytest.raises(ConfigError, match="labels; expected one of"):
        from_dict(RunConfig, kept)
