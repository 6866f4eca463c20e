"""Several labels a record, from an import to a score: the loss and its clipped sum against oracles,
a private run, what is refused.
"""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made import secrets
from PIL import Image
from sklearn.metrics import average_precision_score

from dpvision.checkpoint import load_checkpoint
from dpvision.config import (
    ClassifierConfig,
    DataConfig,
    HardwareConfig,
    OptimConfig,
    PrivacyConfig,
    ResNetConfig,
    RunConfig,
)
from dpvision.data.importer import import_samples
from dpvision.data.keys import StepKey
from dpvision.data.loader import image_batches, physical_batches
from dpvision.data.multi_label import NOT_KNOWN
from dpvision.data.open import open_store
from dpvision.data.sources import Sample, Source
from dpvision.data.split import split_store
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.dp.clip import clipped_sum
from dpvision.encoders.embeddings import write_embeddings
from dpvision.errors import ConfigError, DataError
from dpvision.eval.any_of_labels import AnyOfLabels
from dpvision.eval.probes.own_head import OwnHead, score_own_head
from dpvision.eval.probes.suite import evaluate
from dpvision.models import make_model
from dpvision.privacy.ledger_format import read_ledger
from dpvision.privacy.sampling import derive_rng
from dpvision.runs.store_checks import check_labels
from dpvision.synthetic.scenes import LABELS
from dpvision.train import gates, start
from dpvision.train.loop import fit
from dpvision.train.start import new_session, resumed_session
from dpvision.train.step import step_sum

RESNET = ResNetConfig(image_size=16, depths=(1,), widths=(16,), groups=4)
NUM_CLASSES = len(LABELS)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    """The two parts of a private store of scenes, labelled with the shapes in them."""
    folder = tmp_path_factory.mktemp("several")
    write_scenes(folder / "all", 120, 16, multi_label=True, public=False)
    return split_store(folder / "all", folder / "mine", folder / "test", 0.6)


@pytest.fixture
def config(halves: tuple[Store, Store]) -> RunConfig:
    count = halves[0].num_records
    return RunConfig(
        recipe="supervised.micro",
        privacy=PrivacyConfig(
            dataset_size=count,
            expected_batch_size=20,
            steps=2,
            max_grad_norm=0.5,
            noise_multiplier=2.0,
        ),
        model=ClassifierConfig(
            encoder=RESNET, num_classes=NUM_CLASSES, loss="sigmoid", multi_label=True
        ),
        data=DataConfig(
            store=str(halves[0].path), crop_scale=(0.8, 1.0), horizontal_flip=False, views=2
        ),
        optim=OptimConfig(
            name="sgd", learning_rate=0.5, momentum=0.0, weight_decay=0.0, schedule="constant"
        ),
        hardware=HardwareConfig(device="cpu", physical_batch_size=16, workers=1),
    )


def one_label(config: RunConfig, store: Store) -> RunConfig:
    return replace(
        config,
        model=replace(config.model, multi_label=False),
        data=replace(config.data, store=str(store.path)),
    )


def test_a_private_run_stops_goes_on_and_is_scored_by_what_its_network_says(
    config: RunConfig, halves: tuple[Store, Store], tmp_path: Path
) -> None:
    root, test = tmp_path / "run", halves[1]
    with new_session(config, root):
        pass
    with resumed_session(root) as session:
        assert fit(session, quiet=True) and session.updates == 2
    assert read_ledger(root / "ledger.jsonl").steps == 2
    precision, decisions = score_own_head(root, test, workers=1)
    model = make_model(config.model, 1)
    model.load_state_dict(load_checkpoint(root).model)
    x, row, _ = next(image_batches(test, None, 16, config.data, batch_size=500, workers=1))
    with torch.no_grad():
        logit = model(x).numpy()
    truth = np.array([[k in test.record(int(r)).labels for k in range(NUM_CLASSES)] for r in row])
    had = truth.any(axis=0)
    assert had.sum() > 4 and len(row) == test.num_records == precision.n
    assert precision.value == pytest.approx(
        average_precision_score(truth[:, had], logit[:, had], average="macro")
    )
    assert decisions.value == pytest.approx(((logit > 0) == truth).mean())
    assert precision.visibility == decisions.visibility == "private"
    out = test.path / "confidential" / "embedded.npz"
    write_embeddings(root, test.path, out, workers=1)
    with np.load(out) as arrays:
        assert arrays["label"].dtype == np.uint8 and (arrays["label"] == truth).all()


def test_the_loss_of_a_record_is_the_sum_of_its_binary_losses(
    config: RunConfig, halves: tuple[Store, Store]
) -> None:
    store, model = halves[0], make_model(replace(config.model, head_init="xavier"), 0).double()
    rows = np.arange(6)
    (batch,) = physical_batches(
        store,
        rows,
        StepKey(0, 0),
        config.data,
        16,
        physical_batch_size=6,
        workers=1,
        num_classes=NUM_CLASSES,
    )
    losses = start.loss_function(config)(
        model, batch._replace(image_BVCHW=batch.image_BVCHW.double()), StepKey(0, 0)
    )
    for b, row in enumerate(rows):
        p_VK = torch.sigmoid(model(batch.image_BVCHW[b].double()))
        own = store.record(int(row)).labels
        slow = (
            sum(
                -torch.log(p_K[k] if k in own else 1 - p_K[k])
                for p_K in p_VK
                for k in range(NUM_CLASSES)
            )
            / 2
        )
        assert losses[b].item() == pytest.approx(slow.item(), rel=1e-10)


def test_the_clipped_sum_of_a_step_is_that_of_the_vmap_oracle(
    config: RunConfig, tmp_path: Path
) -> None:
    config = replace(
        config,
        model=replace(config.model, head_init="xavier"),
        hardware=replace(config.hardware, physical_batch_size=8),
    )
    with new_session(config, tmp_path / "run") as session:
        plan, store = session.plan, session.store
        total, _ = step_sum(0, session, secrets().draw)
        drawn = session.rows[
            plan.another_run().draw(0, len(session.rows), derive_rng(secrets().draw, 0))
        ]
        (batch,) = physical_batches(
            store,
            drawn,
            StepKey(config.seed, 0),
            config.data,
            16,
            physical_batch_size=99,
            workers=1,
            num_classes=NUM_CLASSES,
        )
        oracle = clipped_sum(
            session.loss_fn,
            session.model,
            batch,
            StepKey(0, 0),
            max_grad_norm=plan.max_grad_norm,
            method="vmap",
        )
    assert total.num_records == len(drawn) > 8, "more than one physical batch"
    assert (oracle.norms_B > 0.5).any()
    for name, value in oracle.grads.items():
        torch.testing.assert_close(
            total.grads[name], value.double(), rtol=1e-4, atol=1e-5, msg=name
        )


def test_a_record_without_a_list_contributes_exactly_zero(
    config: RunConfig, halves: tuple[Store, Store]
) -> None:
    model, loss_fn = (
        make_model(replace(config.model, head_init="xavier"), 0),
        start.loss_function(config),
    )
    rows = np.arange(5)
    (batch,) = physical_batches(
        halves[0],
        rows,
        StepKey(0, 0),
        config.data,
        16,
        physical_batch_size=5,
        workers=1,
        num_classes=NUM_CLASSES,
    )
    assert batch.label_B is not None
    label_BK = batch.label_B.clone()
    label_BK[2] = NOT_KNOWN
    some = clipped_sum(
        loss_fn, model, batch._replace(label_B=label_BK), StepKey(0, 0), max_grad_norm=0.5
    )
    rest = torch.tensor([0, 1, 3, 4])
    without = type(batch)(*(t if t is None else t[rest] for t in batch))
    alone = clipped_sum(loss_fn, model, without, StepKey(0, 0), max_grad_norm=0.5)
    for name, value in alone.grads.items():
        torch.testing.assert_close(some.grads[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_the_gates_look_at_batches_of_zeros_and_ones(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    for name in ("check_separable", "check_exact"):
        real = getattr(gates, name)
        monkeypatch.setattr(
            gates,
            name,
            lambda f, m, batch, key, real=real: (
                seen.append(batch.label_B),
                real(f, m, batch, key),
            ),
        )
    with new_session(config, tmp_path / "run"):
        pass
    assert len(seen) == 2 and all(
        label.shape == (4, NUM_CLASSES) and label.dtype == torch.uint8 for label in seen
    )


def _store(path: Path, labels: list) -> Store:
    rng = np.random.default_rng(0)
    made = (
        Sample(f"k{i}", _png(rng), {} if label is None else {"label": label})
        for i, label in enumerate(labels)
    )
    return import_samples(made, path)


def _png(rng: np.random.Generator) -> bytes:
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("labels", "multi_label", "words"),
    [
        (
            [[0], [1, 2], []],
            False,
            "several labels a record; expected one with multi_label=False. Pass "
            "--model.multi-label",
        ),
        (
            [0, 1, 2],
            True,
            "one label a record; expected several with multi_label=True. Drop --model.multi-label",
        ),
        ([[0], [1, 9], [9]], True, "label=9 in 2 records is outside the range; expected 0 to 8"),
        (
            [[0], None, [1]],
            True,
            "1 of 3 records have no label; expected a list each.*Write \\[\\] for none",
        ),
        ([[1, 2], [2, 1], [1, 2]], True, "every record has the same labels"),
        ([[], [], []], True, "every record has the same labels"),
    ],
    ids=["several for one", "one for several", "outside", "missing", "equal", "empty"],
)
def test_labels_that_do_not_fit_are_refused_before_anything_is_charged(
    config: RunConfig, tmp_path: Path, labels: list, multi_label: bool, words: str
) -> None:
    store = _store(tmp_path / "store", labels)
    asked = replace(
        config,
        privacy=replace(config.privacy, dataset_size=3, expected_batch_size=1.0),
        model=replace(config.model, num_classes=9, multi_label=multi_label),
        data=replace(config.data, store=str(store.path)),
    )
    with pytest.raises(DataError, match=words), new_session(asked, tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob("LEDGERS/*/*"))


def test_labels_that_fit_are_taken(halves: tuple[Store, Store], tmp_path: Path) -> None:
    check_labels(halves[0], np.arange(halves[0].num_records), NUM_CLASSES, multi_label=True)
    store = _store(tmp_path / "store", [[0, 1], [], [0, 1]])
    check_labels(store, np.arange(3), 2, multi_label=True)
    with pytest.raises(DataError, match="every record has the same"):
        check_labels(store, np.array([0, 2]), 2, multi_label=True)


def test_softmax_over_classes_that_do_not_exclude_one_another_is_refused(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="loss='softmax'; expected 'sigmoid' with multi_label"):
        replace(config.model, loss="softmax")


@pytest.mark.slow
def test_scores_that_would_mean_nothing_are_refused(
    config: RunConfig, halves: tuple[Store, Store], tmp_path: Path
) -> None:
    test = halves[1]
    single = write_scenes(tmp_path / "single", 40, 16, first=500, public=False)
    for name, asked in (("several", config), ("one", one_label(config, single))):
        asked = replace(
            asked,
            privacy=replace(
                asked.privacy, dataset_size=open_store(asked.data.store or "").num_records
            ),
        )
        with new_session(asked, tmp_path / name) as session:
            fit(session, secrets=secrets(), quiet=True)
    with pytest.raises(DataError, match="has one label per record; expected several"):
        score_own_head(tmp_path / "several", write_scenes(tmp_path / "single2", 40, 16, first=900))
    with pytest.raises(DataError, match="has several labels per record; expected one"):
        score_own_head(tmp_path / "one", test)
    real = AnyOfLabels("real.json", tuple(frozenset({1}) for _ in range(test.num_records)))
    with pytest.raises(ConfigError, match=r"--labels with a multi-label run.*Drop --labels"):
        score_own_head(tmp_path / "several", test, any_of=real)
    with pytest.raises(
        DataError, match=r"several labels per record; expected one for probes.*drop --train"
    ):
        evaluate(tmp_path / "several", halves[0], test, protocols=(OwnHead(),))
    by_name = [[LABELS[label] for label in test.record(i).labels] for i in range(20)]
    renamed = import_samples(
        (Sample(f"k{i}", test.read(i), {"label": by_name[i]}) for i in range(20)),
        tmp_path / "named",
        public=True,
    )
    same = import_samples(
        Source(
            iter(
                Sample(f"k{i}", test.read(i), {"label": [*test.record(i).labels]})
                for i in range(20)
            ),
            [*LABELS],
        ),
        tmp_path / "same",
    )
    assert renamed.label_names != same.label_names, "numbered by the alphabet"
    ours, theirs = (
        score_own_head(tmp_path / "several", store, workers=1) for store in (same, renamed)
    )
    assert [score.value for score in ours] == [score.value for score in theirs], (
        "classes are matched by name"
    )
    numbers = _store(tmp_path / "many", [[0], [NUM_CLASSES]])
    with pytest.raises(DataError, match=f"classes of the stores differ: '0', '{NUM_CLASSES}' of"):
        score_own_head(tmp_path / "several", numbers)
    unlabelled = _store(tmp_path / "none", [[], []])
    with pytest.raises(DataError, match="none of 2 records has any class"):
        score_own_head(tmp_path / "several", unlabelled, workers=1)
