from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dpvision.data.keys import StepKey
from dpvision.data.store import Store
from dpvision.errors import ConfigError, DataError
from dpvision.eval.probes import fine_tune as module
from dpvision.eval.probes.few_shot_probe import few_shot_probe
from dpvision.eval.probes.fine_tune import Tuned, augmented, fine_tune, make_optimizer
from dpvision.eval.probes.linear_probe import fit_linear_probe
from dpvision.eval.probes.protocol import Task
from dpvision.eval.probes.records import draw_shots, units
from dpvision.eval.probes.settings import FewShotProbeSettings, FineTuneSettings

from ..labelled import MEAN, STD, OfUnits, conv_encoder, vit_encoder, write_colours

QUICK = FineTuneSettings(
    draws=1, epochs=12, warmup_epochs=1, batch_size=16, learning_rates=(3e-3,), auto_augment=False
)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """40 images of each of three colours, two of each person."""
    return write_colours(
        tmp_path_factory.mktemp("few") / "train",
        40,
        0,
        person=[f"p{i // 6}.{i % 3}" for i in range(120)],
    )


@pytest.fixture(scope="module")
def test(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_colours(tmp_path_factory.mktemp("few") / "test", 30, 1)


def _rows(store: Store) -> tuple[Store, np.ndarray]:
    return store, np.arange(store.num_records)


def test_a_draw_has_k_of_each_class_and_follows_its_seed() -> None:
    label_N = np.random.Generator(np.random.PCG64(0)).integers(0, 5, 300)
    draws = [draw_shots(label_N, 7, seed) for seed in (0, 0, 1)]
    assert all(
        (np.bincount(label_N[rows]) == 7).all() and len(set(rows.tolist())) == 35 for rows in draws
    )
    assert (draws[0] == draws[1]).all() and len(np.intersect1d(draws[0], draws[2])) < 20


def test_every_record_is_drawn_equally_often() -> None:
    label_N = np.repeat([0, 1], [10, 30])
    counts = sum(np.bincount(draw_shots(label_N, 5, seed), minlength=40) for seed in range(2000))
    expected = np.repeat([2000 * 5 / 10, 2000 * 5 / 30], [10, 30])
    assert (np.abs(counts - expected) < 4.5 * np.sqrt(expected)).all()


def test_too_many_shots_name_the_classes_and_their_counts() -> None:
    label_N = np.repeat([0, 1, 2], [20, 3, 8])
    with pytest.raises(
        DataError,
        match=r"shots=9, but 'dog' has 3, 'emu' has 8; "
        r"expected 9 training images of each class. Use --shots 3",
    ):
        draw_shots(label_N, 9, 0, names=["cat", "dog", "emu"])
    with pytest.raises(ConfigError, match="shots=0"):
        draw_shots(label_N, 0, 0)


def _blobs(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(seed))
    label = np.arange(n) % 3
    x = rng.standard_normal((n, 12)).astype(np.float32)
    x[np.arange(n), label] += 2
    return x, label


def test_the_probe_sees_the_drawn_images_only_and_more_of_them_help() -> None:
    (x, label), (test_x, truth) = _blobs(600, 0), _blobs(900, 1)
    unit = np.arange(600)
    share = {}
    for k in (3, 100):
        predicted = few_shot_probe(x, label, unit, test_x, k, FewShotProbeSettings(draws=4))
        rows = draw_shots(label, k, 2)
        assert (
            predicted[2]
            == fit_linear_probe(x[rows], label[rows], unit[rows], seed=2).predict(test_x)
        ).all()
        share[k] = np.mean([(p == truth).mean() for p in predicted])
    assert share[3] + 0.05 < share[100]
    ridge = few_shot_probe(
        x, label, unit, test_x, 100, FewShotProbeSettings(draws=1, classifier="ridge")
    )
    assert abs((ridge[0] == truth).mean() - share[100]) < 0.05


def test_transformers_get_adamw_and_convnets_sgd() -> None:
    settings = FineTuneSettings()
    for encoder, kind, rates, decay in (
        (vit_encoder(), torch.optim.AdamW, (3e-3, 3e-4, 3e-5), 0.05),
        (conv_encoder(), torch.optim.SGD, (1e-2, 1e-3, 1e-4), 0.0),
    ):
        optimizer = make_optimizer(Tuned(encoder, 3), encoder, settings)
        assert type(optimizer) is kind and settings.rates(encoder) == rates
        assert (
            optimizer.defaults["weight_decay"] == decay
            and optimizer.defaults.get("momentum", 0.9) == 0.9
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "conv"])
def test_fine_tuning_learns_leaves_the_encoder_alone_and_repeats_itself(
    kind: str, train: Store, test: Store
) -> None:
    encoder, settings = (
        (vit_encoder(), QUICK)
        if kind == "vit"
        else (conv_encoder(), replace(QUICK, learning_rates=(0.1,)))
    )
    assert encoder.backbone is not None
    before = {name: value.clone() for name, value in encoder.backbone().state_dict().items()}
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    first = fine_tune(encoder, Task(_rows(train), _rows(test), workers=1), 10, settings)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(8)
    again = fine_tune(encoder, Task(_rows(train), _rows(test), batch_size=17), 10, settings)
    accuracy = (first.predicted[0] == first.label_M).mean()
    assert accuracy > 0.7 and (first.predicted[0] == again.predicted[0]).mean() > 0.98
    assert (first.label_M == test.labels).all()
    assert all(
        torch.equal(before[name], value) for name, value in encoder.backbone().state_dict().items()
    )


def test_the_whole_network_is_trained(train: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tuned] = []
    monkeypatch.setattr(
        module._Job,
        "predict",
        lambda self, model, store, rows: (made.append(model), (np.zeros(1),) * 3)[1],
    )
    encoder = vit_encoder()
    fine_tune(encoder, Task(_rows(train), _rows(train), workers=1), 4, replace(QUICK, epochs=2))
    assert encoder.backbone is not None
    moved = [
        not torch.equal(a, b)
        for a, b in zip(encoder.backbone().parameters(), made[0].backbone.parameters(), strict=True)
    ]
    assert all(moved)


@pytest.mark.slow
def test_the_rate_is_chosen_on_other_persons_images_and_all_are_trained_on_then(
    train: Store, test: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[np.ndarray] = []
    scored: list[np.ndarray] = []
    real_train, real_predict = module._Job.train, module._Job.predict
    monkeypatch.setattr(
        module._Job,
        "train",
        lambda self, rows, *rest: (trained.append(rows), real_train(self, rows, *rest))[1],
    )
    monkeypatch.setattr(
        module._Job,
        "predict",
        lambda self, m, store, rows: (scored.append(rows), real_predict(self, m, store, rows))[1],
    )
    settings = replace(QUICK, learning_rates=(1e3, 3e-3), epochs=8)
    result = fine_tune(vit_encoder(), Task(_rows(train), _rows(test), workers=1), 20, settings)
    assert result.learning_rate == 3e-3
    assert len(trained) == 3 and len(trained[2]) == 60 and len(scored[2]) == 90
    unit_N = units(train)
    for fitted, held in zip(trained[:2], scored[:2], strict=True):
        assert len(fitted) + len(held) == 60 and len(held) > 6
        assert not set(unit_N[fitted]) & set(unit_N[held])


def test_with_fewer_than_five_images_the_middle_rate_is_taken_and_said(
    train: Store, test: Store
) -> None:
    settings = replace(QUICK, learning_rates=(1.0, 1e-9, 1e-3), epochs=2)
    result = fine_tune(vit_encoder(), Task(_rows(train), _rows(test), workers=1), 4, settings)
    assert result.learning_rate == 1e-3 and "lr 0.001 (middle of" in settings.words(
        vit_encoder(), 4
    )
    assert "by a held-out fifth" in settings.words(vit_encoder(), 5)


def test_fewer_than_five_persons_are_refused_before_training(
    train: Store, test: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module._Job, "train", lambda *a: pytest.fail("trained"))
    settings = replace(QUICK, draws=2, learning_rates=(1e-3, 3e-3))
    with pytest.raises(
        DataError, match=r"the 30 images of a draw are of 4 persons; expected at least five"
    ):
        fine_tune(
            vit_encoder(), OfUnits(_rows(train), _rows(test), of_N=np.arange(120) % 4), 10, settings
        )


def test_training_images_are_augmented_by_record(train: Store) -> None:
    encoder, rows, settings = vit_encoder(), np.arange(12), replace(QUICK, auto_augment=False)
    x, kept = augmented(train, rows, StepKey(0, 0), encoder, settings, 1)
    shuffled, _ = augmented(train, rows[::-1].copy(), StepKey(0, 0), encoder, settings, 2)
    assert (kept == rows).all() and torch.equal(x, shuffled.flip(0))
    assert not torch.equal(x, augmented(train, rows, StepKey(0, 1), encoder, settings, 1)[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = augmented(
            train, rows, StepKey(0, 0), encoder, replace(settings, auto_augment=True), 1
        )[0]
    assert (policy != x).flatten(1).any(
        dim=1
    ).sum() > 0 and policy.abs().max() <= 1.0001  # (0 ... 255) under mean and std of 0.5


def test_what_cannot_be_tuned_is_refused(train: Store, test: Store) -> None:
    fixed = replace(vit_encoder(), name="hog", family="fixed", backbone=None)
    with pytest.raises(
        ConfigError, match=r"fine_tune: hog has no trainable weights.*few_shot_probe"
    ):
        fine_tune(fixed, Task(_rows(train), _rows(test)), 5, QUICK)
    with pytest.raises(DataError, match=r"shots=41, but 'c0' has 40, 'c1' has 40, 'c2' has 40"):
        fine_tune(vit_encoder(), Task(_rows(train), _rows(test)), 41, QUICK)
    for wrong, words in [
        ({"draws": 0}, "draws=0"),
        ({"epochs": 3}, "warmup_epochs=10"),
        ({"learning_rates": ()}, "learning_rates"),
    ]:
        with pytest.raises(ConfigError, match=words):
            FineTuneSettings(**wrong)
    with pytest.raises(ConfigError, match="draws=0"):
        FewShotProbeSettings(draws=0)


def test_a_head_starts_at_zero_on_the_features_of_the_encoder() -> None:
    encoder = replace(vit_encoder(), mean=MEAN, std=STD)
    tuned = Tuned(encoder, 4)
    x_BCHW = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(tuned(x_BCHW), torch.zeros(3, 4))
        tuned.weight.copy_(nn.init.eye_(torch.empty(4, 32)))
        assert torch.allclose(
            tuned.eval()(x_BCHW), encoder.poolings(x_BCHW)["mean"][:, :4], atol=1e-6
        )
