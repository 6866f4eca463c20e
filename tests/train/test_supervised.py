"""Supervised runs: they learn, resume and clip as the oracle does; what they start from and refuse;
what their own head scores.
"""

import io
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made import secrets
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from dpvision.checkpoint import load_checkpoint
from dpvision.config import (
    ClassifierConfig,
    DataConfig,
    HardwareConfig,
    OptimConfig,
    PrivacyConfig,
    ResNetConfig,
    RunConfig,
    ViTConfig,
)
from dpvision.data.batch import Batch
from dpvision.data.importer import import_samples
from dpvision.data.keys import StepKey
from dpvision.data.loader import image_batches, physical_batches
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.dp.clip import LossFn, clipped_sum
from dpvision.dp.separable import in_float64
from dpvision.encoders.trained import run_encoder
from dpvision.errors import CheckpointError, ConfigError, DataError, PrivacyError
from dpvision.eval.probes.own_head import score_own_head
from dpvision.models import make_model
from dpvision.models.classifier import Classifier
from dpvision.privacy.ledger_format import read_ledger
from dpvision.privacy.plan import draft_plan
from dpvision.privacy.sampling import derive_rng
from dpvision.recipes import RECIPES
from dpvision.train import gates, loop, start
from dpvision.train.loop import fit
from dpvision.train.parent import start_from
from dpvision.train.start import new_session, resumed_session
from dpvision.train.step import step_sum

pytestmark = pytest.mark.usefixtures("gates_once")

NUM_RECORDS = 500
RESNET = ResNetConfig(image_size=8, depths=(1, 1), widths=(16, 32), groups=4)
VIT = ViTConfig(image_size=16, patch_size=4, depth=1, width=16, num_heads=2)


def samples(first: int, last: int, labels: dict[int, int] | None = None) -> Iterator[Sample]:
    """scikit-learn's digits as images; ``labels`` has other labels for some, None for none."""
    digits = load_digits()
    for i in range(first, last):
        file = io.BytesIO()
        Image.fromarray((digits.images[i] * 255 / 16).astype(np.uint8)).convert("RGB").save(
            file, "PNG"
        )
        label = (labels or {}).get(i, int(digits.target[i]))
        yield Sample(f"digit-{i}", file.getvalue(), {"label": label} if label >= 0 else {})


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return import_samples(samples(0, NUM_RECORDS), tmp_path_factory.mktemp("digits") / "train")


@pytest.fixture(scope="module")
def public_digits(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return import_samples(
        samples(1000, 1500), tmp_path_factory.mktemp("digits") / "test", public=True
    )


@pytest.fixture(scope="module")
def supervised(digits: Store) -> RunConfig:
    return RunConfig(
        recipe="supervised.micro",
        privacy=PrivacyConfig(
            dataset_size=NUM_RECORDS,
            expected_batch_size=40,
            steps=3,
            max_grad_norm=0.5,
            noise_multiplier=2.0,
        ),
        model=ClassifierConfig(encoder=RESNET, num_classes=10),
        data=DataConfig(
            store=str(digits.path), crop_scale=(0.8, 1.0), horizontal_flip=False, views=2
        ),
        optim=OptimConfig(
            name="sgd",
            learning_rate=0.5,
            momentum=0.0,
            weight_decay=0.0,
            schedule="constant",
            ema_decay=0.9,
        ),
        hardware=HardwareConfig(device="cpu", physical_batch_size=16, workers=1),
    )


def train(config: RunConfig, root: Path) -> Path:
    with new_session(config, root) as session:
        assert fit(session, secrets=secrets(), quiet=True)
    return root


@pytest.fixture(scope="module")
def autoencoder(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The conftest's run, complete; tests only read it."""
    return train(config, tmp_path_factory.mktemp("autoencoder") / "run")


@pytest.fixture(scope="module")
def classifier(supervised: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run on digits; tests only read it."""
    return train(supervised, tmp_path_factory.mktemp("classifier") / "run")


@pytest.mark.parametrize(
    ("encoder", "at_least"),
    [(RESNET, 0.7), (ViTConfig(image_size=8, patch_size=2, depth=2, width=32, num_heads=2), 0.3)],
    ids=["resnet", "vit"],
)
def test_without_privacy_it_learns_digits_well_beyond_chance(
    supervised: RunConfig,
    public_digits: Store,
    tmp_path: Path,
    encoder: ResNetConfig | ViTConfig,
    at_least: float,
) -> None:
    config = replace(
        supervised,
        privacy=PrivacyConfig(
            dataset_size=NUM_RECORDS,
            expected_batch_size=100,
            steps=120,
            guarantee="none",
            max_grad_norm=None,
        ),
        model=ClassifierConfig(encoder=encoder, num_classes=10),
        data=replace(supervised.data, views=1),
        optim=OptimConfig(
            learning_rate=1e-2, betas=(0.9, 0.999), weight_decay=0.0, schedule="vip", warmup_steps=5
        ),
        hardware=replace(supervised.hardware, physical_batch_size=128),
    )
    score, *_ = score_own_head(train(config, tmp_path / "run"), public_digits, workers=1)
    assert score.chance < 0.15 and score.low > at_least, score


def test_a_private_run_with_views_and_an_average_stops_resumes_and_completes(
    supervised: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, root = loop.privatize, tmp_path / "run"

    def stop_at_two(
        total: object, plan: object, number: int, key: bytes, **owners: object
    ) -> object:
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(total, plan, number, key, **owners)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "privatize", stop_at_two)
    with new_session(supervised, root) as session:
        assert not fit(session, quiet=True)
    monkeypatch.undo()
    with resumed_session(root) as session:
        assert isinstance(session.model, Classifier) and session.updates == 2
        assert fit(session, quiet=True) and session.updates == 3
    checkpoint = load_checkpoint(root)
    assert read_ledger(root / "ledger.jsonl").steps == 3
    assert checkpoint.ema is not None and not torch.equal(
        checkpoint.ema["head.weight"], checkpoint.model["head.weight"]
    )
    assert checkpoint.ema["head.weight"].any()


def test_the_clipped_sum_of_a_step_is_that_of_the_vmap_oracle(
    supervised: RunConfig, tmp_path: Path
) -> None:
    config = replace(supervised, model=replace(supervised.model, head_init="xavier"))
    with new_session(config, tmp_path / "run") as session:
        plan, store = session.plan, session.store
        total, _ = step_sum(0, session, secrets().draw)
        drawn = session.rows[
            plan.another_run().draw(0, len(session.rows), derive_rng(secrets().draw, 0))
        ]
        key = StepKey(config.seed, 0)
        (batch,) = physical_batches(
            store, drawn, key, config.data, 8, physical_batch_size=len(drawn), workers=1
        )
        assert batch.label_B is not None and batch.image_BVCHW.shape[1] == 2
        assert torch.equal(batch.label_B, torch.from_numpy(store.labels[drawn])), (
            "a record's own label"
        )
        oracle = clipped_sum(
            session.loss_fn,
            session.model,
            batch,
            key,
            max_grad_norm=plan.max_grad_norm,
            method="vmap",
        )
    assert total.num_records == len(drawn) > 16, "more than one physical batch"
    assert (oracle.norms_B > 0.5).any()
    for name, value in oracle.grads.items():
        torch.testing.assert_close(
            total.grads[name], value.double(), rtol=1e-4, atol=1e-5, msg=name
        )


class Centred(nn.Module):
    """Mean of the batch taken off: every record moves every other."""

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return x_BCHW - x_BCHW.mean(0, keepdim=True)


def test_records_that_mix_in_the_encoder_are_refused(
    supervised: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixing(cfg: ClassifierConfig, seed: int) -> Classifier:
        model = make_model(cfg, seed)
        model.encoder.pool = Centred()
        return model

    monkeypatch.setattr(start, "make_model", mixing)
    config = replace(supervised, data=replace(supervised.data, views=1))
    with pytest.raises(PrivacyError, match=r"encoder\.pool"), new_session(config, tmp_path / "run"):
        pass


def test_the_gates_see_a_gradient_of_every_parameter_though_the_head_starts_at_zero(
    supervised: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moving(model: nn.Module, loss_fn: LossFn, batch: Batch, key: StepKey) -> set[str]:
        names = [name for name, _ in model.named_parameters()]
        grads = torch.autograd.grad(loss_fn(model, batch, key).sum(), list(model.parameters()))
        return {name for name, grad in zip(names, grads, strict=True) if grad.any()}

    seen: list[set[str]] = []
    real = gates.check_exact
    monkeypatch.setattr(
        gates,
        "check_exact",
        lambda loss_fn, model, batch, key: (
            seen.append(moving(model, loss_fn, in_float64(batch), key)),
            real(loss_fn, model, batch, key),
        ),
    )
    with new_session(supervised, tmp_path / "run") as session:
        every = {name for name, _ in session.model.named_parameters()}
        as_it_starts = moving(
            session.model, session.loss_fn, start.example_batch(supervised), StepKey(0, 0)
        )
    assert seen == [every]
    assert as_it_starts == {"head.weight", "head.bias"}, (
        "behind a head of zeros any rule for the encoder's gradients would look exact"
    )


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({3: -1, 7: -1}, "2 of 20 records have no label"),
        ({5: 10}, "label=10 in 1 records is outside the range; expected 0 to 9"),
        ({i: 4 for i in range(20)}, "one class only, label=4"),
    ],
    ids=["unlabelled", "outside", "one class"],
)
def test_labels_that_cannot_be_learnt_are_refused_before_anything_is_charged(
    supervised: RunConfig, tmp_path: Path, labels: dict[int, int], words: str
) -> None:
    store = import_samples(samples(0, 20, labels), tmp_path / "store")
    config = replace(
        supervised,
        privacy=replace(supervised.privacy, dataset_size=20, expected_batch_size=5),
        data=replace(supervised.data, store=str(store.path)),
    )
    with pytest.raises(DataError, match=words), new_session(config, tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("num_classes", [7, 9])
def test_a_class_list_of_another_length_is_refused(
    config: RunConfig, tmp_path: Path, num_classes: int
) -> None:
    """The names are declared, so the error needs no count of private labels."""
    wrong = tuned(config, None, num_classes=num_classes)
    words = f"has 8 class names; expected {num_classes}, .* Pass --model.num-classes 8, or import"
    with pytest.raises(DataError, match=words) as raised, new_session(wrong, tmp_path / "run"):
        pass
    assert "operator only" not in str(raised.value) and not (tmp_path / "run").exists()


def tuned(config: RunConfig, parent: Path | None, **model: object) -> RunConfig:
    """The conftest's run with a classifier on its encoder."""
    encoder = config.model.encoder
    settings = {"encoder": encoder, "num_classes": 8, **model}
    return replace(
        config,
        model=ClassifierConfig(**settings),
        init_from=None if parent is None else str(parent),
    )


def on(store: Store, config: RunConfig) -> RunConfig:
    """Digits have no class names, so any number of classes from 10 on fits them."""
    privacy = replace(config.privacy, dataset_size=store.num_records)
    return replace(config, privacy=privacy, data=replace(config.data, store=str(store.path)))


def test_fine_tuning_takes_the_encoder_of_an_autoencoder_and_nothing_else(
    config: RunConfig, autoencoder: Path, tmp_path: Path
) -> None:
    parent = load_checkpoint(autoencoder)
    with new_session(tuned(config, autoencoder), tmp_path / "tuned") as session:
        weights = session.model.state_dict()
        assert all(
            torch.equal(weights[name], parent.model[name])
            for name in weights
            if name.startswith("encoder.")
        )
        assert not weights["head.weight"].any()
        fit(session, quiet=True)
    lineage = load_checkpoint(tmp_path / "tuned").manifest["lineage"]
    assert [entry["guarantee"]["steps"] for entry in lineage] == [4, 4]
    assert lineage[0]["store_id"] == lineage[1]["store_id"], "the statement adds them up"


def test_weights_that_predict_something_else_are_refused_though_shapes_agree(
    config: RunConfig, autoencoder: Path, tmp_path: Path
) -> None:
    """A parent from before there were targets predicts plain pixels, whatever its config leaves
    unsaid.
    """
    parent = load_checkpoint(autoencoder)
    del parent.manifest["config"]["model"]["target"]
    normalised = replace(config.model, target="normalised_pixels")
    start_from(make_model(config.model, 1), config.model, parent)
    with pytest.raises(CheckpointError, match="target='pixels'; expected 'normalised_pixels'"):
        start_from(make_model(normalised, 1), normalised, parent)


def test_the_pixel_head_of_an_autoencoder_is_never_taken_for_a_class_head(
    config: RunConfig, digits: Store, autoencoder: Path, tmp_path: Path
) -> None:
    # Decoder width 16 = encoder width, 48 numbers of a patch: the two heads have one shape and one
    # name.
    parent = load_checkpoint(autoencoder)
    many = on(digits, tuned(config, autoencoder, num_classes=48))
    with new_session(many, tmp_path / "tuned") as session:
        head = session.model.state_dict()["head.weight"]
        assert head.shape == parent.model["head.weight"].shape and not head.any()


def test_a_classifier_takes_a_head_of_as_many_classes_only(
    config: RunConfig, digits: Store, tmp_path: Path
) -> None:
    parent = load_checkpoint(train(tuned(config, None), tmp_path / "one"))
    for num_classes in (8, 10):
        made = tuned(config, tmp_path / "one", num_classes=num_classes)
        made = made if num_classes == 8 else on(digits, made)
        with new_session(made, tmp_path / f"to{num_classes}") as session:
            weights = session.model.state_dict()
        assert torch.equal(weights["encoder.norm.weight"], parent.model["encoder.norm.weight"])
        assert weights["head.weight"].shape == (num_classes, 16)
        assert bool(weights["head.weight"].any()) == (num_classes == 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 32}, "another size: encoder.width=16; expected 32"),
        ({"depth": 2}, "another size: encoder.depth=1; expected 2"),
        ({"num_heads": 4}, "another size: encoder.num_heads=2; expected 4"),
        ({"patch_size": 8}, "another size: encoder.patch_size=4; expected 8"),
    ],
    ids=["width", "depth", "heads", "patch"],
)
def test_an_encoder_of_another_size_is_refused_also_where_the_shapes_agree(
    config: RunConfig, autoencoder: Path, tmp_path: Path, change: dict, words: str
) -> None:
    other = replace(config.model.encoder, **change)
    with (
        pytest.raises(CheckpointError, match=words),
        new_session(tuned(config, autoencoder, encoder=other), tmp_path / "x"),
    ):
        pass
    convnet = tuned(config, autoencoder, encoder=replace(RESNET, image_size=16))
    with (
        pytest.raises(CheckpointError, match=r"encoder\.kind='vit'; expected 'resnet'"),
        new_session(convnet, tmp_path / "x"),
    ):
        pass


def test_images_of_another_size_may_be_fine_tuned_on(
    config: RunConfig, autoencoder: Path, tmp_path: Path
) -> None:
    parent = load_checkpoint(autoencoder)
    larger = replace(config.model.encoder, image_size=32)
    with new_session(tuned(config, autoencoder, encoder=larger), tmp_path / "tuned") as session:
        assert torch.equal(
            session.model.state_dict()["encoder.cls_token"], parent.model["encoder.cls_token"]
        )
        assert session.model.encoder.num_patches == 64


def test_a_tainted_parent_is_refused_for_fine_tuning_too(config: RunConfig, tmp_path: Path) -> None:
    plain = replace(
        config,
        privacy=replace(
            config.privacy, guarantee="none", noise_multiplier=None, max_grad_norm=None
        ),
    )
    train(plain, tmp_path / "mae")
    with (
        pytest.raises(PrivacyError, match="without a guarantee"),
        new_session(tuned(config, tmp_path / "mae"), tmp_path / "x"),
    ):
        pass


def test_a_classifiers_encoder_is_an_encoder_like_any_other(
    supervised: RunConfig, classifier: Path, public_digits: Store, tmp_path: Path
) -> None:
    root = classifier
    encoder = run_encoder(root)
    assert encoder.family == "convnet" and encoder.blocks is None and encoder.backbone is not None
    x = next(image_batches(public_digits, None, 8, supervised.data, batch_size=5, workers=1))[0]
    model = make_model(supervised.model, 0)
    model.load_state_dict(load_checkpoint(root).model)
    with torch.no_grad():
        torch.testing.assert_close(encoder.poolings(x)["mean"], model.features(x))
        torch.testing.assert_close(encoder.backbone()(x), model.features(x))


def test_the_own_heads_score_is_the_share_of_right_answers(
    supervised: RunConfig, classifier: Path, public_digits: Store, tmp_path: Path
) -> None:
    root = classifier
    checkpoint = load_checkpoint(root)
    for ema, weights in ((False, checkpoint.model), (True, checkpoint.ema)):
        model = make_model(supervised.model, 1)
        model.load_state_dict(weights)
        x, _, label = next(
            image_batches(public_digits, None, 8, supervised.data, batch_size=500, workers=1)
        )
        with torch.no_grad():
            right = int((model(x).argmax(1) == label).sum())
        score, *_ = score_own_head(root, public_digits, ema=ema, batch_size=64, workers=1)
        assert (
            score.value == right / 500 and score.n == 500 and score.low < score.value < score.high
        )
        assert score.chance == np.bincount(label.numpy()).max() / 500
        assert score.visibility == "public" and ("averaged" in score.name) == ema


def test_the_own_head_refuses_what_it_cannot_score_and_marks_what_is_private(
    supervised: RunConfig,
    classifier: Path,
    autoencoder: Path,
    digits: Store,
    public_digits: Store,
    tmp_path: Path,
) -> None:
    root = classifier
    with pytest.raises(DataError, match="shares records"):
        score_own_head(root, digits)
    private = import_samples(samples(1500, 1520), tmp_path / "private")
    assert score_own_head(root, private, workers=1)[0].visibility == "private"
    outside = import_samples(samples(1500, 1520, {1500: 12}), tmp_path / "outside")
    with pytest.raises(DataError, match="label=12; expected 0 to 9"):
        score_own_head(root, outside)
    unlabelled = import_samples(
        samples(1500, 1510, dict.fromkeys(range(1500, 1510), -1)), tmp_path / "unlabelled"
    )
    with pytest.raises(DataError, match="no labels"):
        score_own_head(root, unlabelled)
    with pytest.raises(ConfigError, match="kind 'mae'; expected 'classifier'"):
        score_own_head(autoencoder, public_digits)
    plain = replace(
        supervised,
        privacy=replace(
            supervised.privacy, guarantee="none", noise_multiplier=None, max_grad_norm=None
        ),
        optim=replace(supervised.optim, ema_decay=None),
    )
    tainted = train(plain, tmp_path / "plain")
    assert score_own_head(tainted, public_digits, workers=1)[0].visibility == "private"
    with pytest.raises(CheckpointError, match="no averaged weights"):
        score_own_head(tainted, public_digits, ema=True)


def test_no_label_stands_openly_in_the_run_folder(
    classifier: Path,
) -> None:
    public = [json.loads(line) for line in (classifier / "progress.jsonl").read_text().splitlines()]
    assert all(set(line) == {"step", "epsilon_at_most"} for line in public)


@pytest.mark.parametrize("name", ["vip.dp_finetune", "supervised.tan", "supervised.dp_nfnet"])
def test_the_papers_epsilon_of_8_follows_from_rdp_and_pld_is_below_it(name: str) -> None:
    config = RECIPES[name]()
    plan = draft_plan(config.privacy)
    assert plan.delta == 8e-7 and plan.dataset_size == 1_281_167
    assert plan.epsilon_rdp is not None and plan.epsilon is not None
    assert 7.9 < plan.epsilon_rdp < 8.0, "rounded to 8 as printed"
    assert plan.epsilon < plan.epsilon_rdp


@pytest.mark.parametrize("name", ["supervised.micro", "vip.micro_finetune"])
def test_the_small_recipes_keep_their_target(name: str) -> None:
    plan = draft_plan(RECIPES[name]().privacy)
    assert plan.epsilon is not None and 7.9 < plan.epsilon <= 8.0
