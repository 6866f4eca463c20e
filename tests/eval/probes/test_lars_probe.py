from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dpvision.config import DataConfig
from dpvision.data.store import Store
from dpvision.encoders.feature_file import collect_features
from dpvision.errors import ConfigError, DataError
from dpvision.eval.probes.lars_probe import (
    LarsHeads,
    LarsResult,
    LarsTrainer,
    lars_probe,
    token_features,
)
from dpvision.eval.probes.linear_probe import fit_linear_probe
from dpvision.eval.probes.protocol import Task
from dpvision.eval.probes.records import warmup_cosine
from dpvision.eval.probes.settings import LarsSettings

from ..labelled import MEAN, STD, OfUnits, conv_encoder, vit_encoder, write_digits

DATA = DataConfig(mean=MEAN, std=STD)
# A few hundred images: at the paper's trust coefficient and the rates that 16,384 scale down to,
# they would take thousands of epochs.
SMALL = LarsSettings(
    blrs=(2.0, 0.5, 0.1),
    trust=0.02,
    batch_size=64,
    epochs=60,
    warmup_epochs=6,
    augment=False,
    eval_resize=1.0,
)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("lars") / "train", 0, 500)


@pytest.fixture(scope="module")
def test(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("lars") / "test", 1000, 1400)


def _probe(
    train: Store,
    test: Store,
    settings: LarsSettings,
    test_rows: np.ndarray | None = None,
    batch_size: int = 256,
) -> LarsResult:
    feature_of, _ = token_features(vit_encoder(), "blocks")
    rows = np.arange(train.num_records)
    test_rows = np.arange(test.num_records) if test_rows is None else test_rows
    task = Task((train, rows), (test, test_rows), batch_size=batch_size, workers=1)
    return lars_probe(feature_of, task, DATA, 8, settings)


def test_updates_are_those_of_you_et_al() -> None:
    settings = LarsSettings(blrs=(0.3, 0.05), epochs=20)
    generator = torch.Generator().manual_seed(1)
    x_BD, label_B = (
        torch.randn(40, 5, generator=generator),
        torch.randint(0, 3, (40,), generator=generator),
    )
    heads = LarsHeads(5, 3, settings, generator)
    weight_R, bias_R = (
        [w.detach().clone() for w in heads.weight_R],
        [b.detach().clone() for b in heads.bias_R],
    )
    trainer = LarsTrainer(heads, settings)
    z_BD = (x_BD - x_BD.mean(0)) / (x_BD.var(0, unbiased=False) + 1e-6).sqrt()
    for r, blr in enumerate(settings.blrs):
        w, b, v_w, v_b = weight_R[r], bias_R[r], torch.zeros(3, 5), torch.zeros(3)
        for rate in (blr * 2.0, blr * 0.5):
            residual = (z_BD @ w.T + b).softmax(1) - F.one_hot(label_B, 3)
            g_w, g_b = residual.T @ z_BD / 40, residual.mean(0)
            v_w = (
                0.9 * v_w + 0.001 * w.norm() / g_w.norm() * g_w
            )  # local rate: trust x |w| / |gradient|, no decay
            v_b = 0.9 * v_b + g_b
            w, b = w - rate * v_w, b - rate * v_b
        weight_R[r], bias_R[r] = w, b
    for factor in (2.0, 0.5):
        trainer.step(x_BD, label_B, factor)
    for r in range(2):
        assert torch.allclose(heads.weight_R[r], weight_R[r], rtol=1e-5, atol=1e-7)
        assert torch.allclose(heads.bias_R[r], bias_R[r], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_it_reaches_what_logistic_regression_reaches(train: Store, test: Store) -> None:
    feature_of, _ = token_features(vit_encoder(), "blocks")
    (x_ND, label_N, _), (y_MD, truth_M, _) = (
        collect_features({"f": lambda x: {"": feature_of(x)}}, store, DATA, 8, workers=1)
        for store in (train, test)
    )
    expected = (
        fit_linear_probe(x_ND["f", ""].numpy(), label_N.numpy()).predict(y_MD["f", ""].numpy())
        == truth_M.numpy()
    ).mean()
    found = _probe(train, test, SMALL)
    accuracy = (found.predicted_M == found.label_M).mean()
    assert expected > 0.6 and (found.label_M == truth_M.numpy()).all()
    assert abs(accuracy - expected) < 0.05


@pytest.mark.slow
def test_predictions_do_not_depend_on_which_images_stand_beside(train: Store, test: Store) -> None:
    settings = replace(SMALL, epochs=8, warmup_epochs=1)
    rows = np.random.Generator(np.random.PCG64(0)).permutation(test.num_records)
    whole = _probe(train, test, settings)
    mixed, alone = (
        _probe(train, test, settings, rows, batch_size=37),
        _probe(train, test, settings, rows[:1]),
    )
    assert (
        mixed.predicted_M == whole.predicted_M[rows]
    ).mean() > 0.99  # a tie may fall otherwise in another batch's rounding
    assert alone.predicted_M[0] == whole.predicted_M[rows[0]]
    assert len(set(whole.predicted_M.tolist())) > 3


def test_running_statistics_are_those_of_the_features_from_the_first_batch_on() -> None:
    x_BD = 30 + 5 * torch.randn(64, 7, generator=torch.Generator().manual_seed(0))
    heads = LarsHeads(7, 2, LarsSettings(), torch.Generator().manual_seed(0))
    trainer = LarsTrainer(heads, LarsSettings())
    for _ in range(3):
        trainer.step(x_BD, torch.arange(64) % 2, 0.1)
    assert torch.allclose(heads.norm.running_mean, x_BD.mean(0)) and torch.allclose(
        heads.norm.running_var, x_BD.var(0)
    )


def test_blocks_and_class_token_are_what_the_papers_probe() -> None:
    encoder = vit_encoder(depth=3)
    net = encoder.backbone().eval().vit
    x_BCHW = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        blocks = net.forward_blocks(x_BCHW)
        last_two = token_features(encoder, "blocks", 2)[0](x_BCHW)
        everything = token_features(encoder, "blocks", 12)[0](x_BCHW)
        cls = token_features(encoder, "cls")[0](x_BCHW)
        assert torch.allclose(
            last_two, torch.stack([b[:, 1:].mean(1) for b in blocks[1:]], 1).flatten(1)
        )
        assert everything.shape == (4, 3 * 32) and torch.equal(everything[:, 32:], last_two)
        assert torch.allclose(cls, net(x_BCHW)[:, 0], atol=1e-5)
        assert not torch.allclose(cls, net(x_BCHW)[:, 1:].mean(1), atol=0.1)


def test_an_encoder_without_blocks_is_probed_on_its_pooling_and_says_so() -> None:
    encoder = conv_encoder()
    feature_of, words = token_features(encoder, "blocks")
    x_BCHW = torch.randn(2, 3, 8, 8)
    assert (
        torch.equal(feature_of(x_BCHW), encoder.poolings(x_BCHW)["mean"])
        and "default pooling" in words
    )
    with pytest.raises(ConfigError, match=r"linear_cls: conv has no class token.*linear_lars"):
        token_features(encoder, "cls")


@pytest.mark.slow
def test_a_rate_that_learns_nothing_is_not_chosen(train: Store, test: Store) -> None:
    settings = replace(SMALL, blrs=(1e-9, 2.0), epochs=40, warmup_epochs=2)
    found = _probe(train, test, settings)
    assert found.blr == 2.0 and (found.predicted_M == found.label_M).mean() > 0.5


def test_held_out_persons_do_not_choose_by_themselves(
    train: Store, test: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, torch.Tensor]] = []
    step = LarsTrainer.step
    monkeypatch.setattr(
        LarsTrainer,
        "step",
        lambda self, x, y, f: (seen.append((id(self), x)), step(self, x, y, f))[1],
    )
    feature_of, _ = token_features(vit_encoder(), "blocks")
    settings = replace(SMALL, epochs=1, warmup_epochs=0, batch_size=1000)
    task = OfUnits(
        (train, np.arange(500)), (test, np.arange(10)), workers=1, of_N=np.arange(500) // 4
    )
    lars_probe(feature_of, task, DATA, 8, settings)
    (_, everything), (_, kept) = seen
    assert (
        len(everything) == 500 and len(kept) % 4 == 0 and 380 <= len(kept) <= 420
    )  # 125 persons of four, a fifth held out whole


@pytest.mark.slow
def test_augmented_passes_differ_and_are_the_same_every_time(train: Store, test: Store) -> None:
    settings = replace(SMALL, epochs=3, warmup_epochs=1, augment=True, crop_scale=(0.5, 1.0))
    lines: list[list[str]] = [[], []]
    feature_of, _ = token_features(vit_encoder(), "blocks")
    rows, test_rows = np.arange(200), np.arange(50)
    task = OfUnits((train, rows), (test, test_rows), workers=1, of_N=rows)
    results = [
        lars_probe(
            feature_of,
            replace(task, batch_size=n, workers=w, say=lines[i].append),
            DATA,
            8,
            settings,
        )
        for i, (n, w) in enumerate(((256, 1), (48, 2)))
    ]
    assert (results[0].predicted_M == results[1].predicted_M).all() and lines[0] == lines[1]
    plain = lars_probe(feature_of, task, DATA, 8, replace(settings, augment=False))
    assert (plain.predicted_M != results[0].predicted_M).any()


def test_the_rate_rises_to_its_peak_and_falls_towards_zero() -> None:
    levels = [warmup_cosine(t, 90, 10) for t in range(90)]
    assert levels[9] == levels[10] == 1 == max(levels) and levels == [
        *sorted(levels[:10]),
        *sorted(levels[10:], reverse=True),
    ]
    assert levels[0] == 0.1 and levels[50] == pytest.approx(0.5) and 0 < levels[-1] < 1e-3


def test_unfit_settings_and_stores_are_refused(train: Store, test: Store) -> None:
    for wrong, words in [
        ({"blrs": ()}, "blrs"),
        ({"blrs": (float("nan"),)}, "blrs"),
        ({"epochs": 5}, r"warmup_epochs=10; expected 0 to epochs - 1 \(4\)"),
        ({"batch_size": 1}, "batch_size"),
        ({"crop_scale": (0.5, 0.1)}, "crop_scale"),
        ({"momentum": 1.0}, "momentum"),
    ]:
        with pytest.raises(ConfigError, match=words):
            LarsSettings(**wrong)
    feature_of, _ = token_features(vit_encoder(), "blocks")
    with pytest.raises(DataError, match=r"4 training records; expected enough to hold out a fifth"):
        lars_probe(feature_of, Task((train, np.arange(4)), (test, np.arange(5))), DATA, 8, SMALL)
