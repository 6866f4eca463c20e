"""Temperature and thresholds: against a grid, scikit-learn, and every cut; only from public images;
a file that is damaged or for other weights is refused.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special
from sklearn.metrics import f1_score, log_loss, recall_score
from torch.nn import functional as F

from dpvision.data.store import Store
from dpvision.encoders.classifier import Loss, load_classifier
from dpvision.errors import CheckpointError, ConfigError, DataError, PrivacyError
from dpvision.eval.probes.calibrate import (
    Scale,
    calibrate,
    fit_scale,
    fit_threshold,
    mean_loss,
)
from dpvision.eval.probes.own_head import score_own_head

from ...adapt.runs_of_heads import head_config, run_head, write_digits
from ...adapt.test_multi_label import NUM_CLASSES, several_config, write_several


def _draw(loss: Loss, temperature: float, num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores, and labels drawn with the probabilities that they have at a temperature."""
    rng = np.random.Generator(np.random.PCG64(seed))
    score_NK = (temperature * rng.normal(0, 2, (num, 5))).astype(np.float32)
    if loss == "sigmoid":
        return score_NK, (rng.random((num, 5)) < special.expit(score_NK / temperature)).astype(int)
    label_N = (score_NK / temperature + rng.gumbel(size=(num, 5))).argmax(axis=1)
    return score_NK, np.eye(5, dtype=int)[label_N]


@pytest.mark.parametrize(
    "scale", [Scale(1e-3, 2.0), Scale(0.4), Scale(7.0, -30.0), Scale(3e4, 1e4)]
)
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_scale_is_the_best_of_a_grid_and_the_one_of_the_draw(loss: Loss, scale: Scale) -> None:
    score_NK, target_NK = _draw(loss, scale.temperature, 4000)
    score_NK = score_NK + np.float32(scale.offset)
    found = fit_scale(score_NK, target_NK, loss)
    step = np.linspace(-0.2, 0.2, 41)
    offsets = scale.offset + scale.temperature * step if loss == "sigmoid" else [0.0]
    grid = [Scale(t, b) for t in scale.temperature * np.exp(step) for b in offsets]
    losses = [mean_loss(score_NK, target_NK, loss, s) for s in grid]
    best = grid[int(np.argmin(losses))]
    assert mean_loss(score_NK, target_NK, loss, found) <= min(losses) + 1e-12
    assert found.temperature == pytest.approx(best.temperature, rel=0.011), "half a step"
    assert found.offset == pytest.approx(best.offset, abs=0.011 * scale.temperature)
    assert found.temperature == pytest.approx(scale.temperature, rel=0.1), "5 times its error"


@pytest.mark.parametrize("scale", [Scale(0.5), Scale(3.0, 1.5)])
def test_the_loss_is_that_of_scikit_learn_and_torch(scale: Scale) -> None:
    score_NK, target_NK = _draw("softmax", 2.0, 50)
    logit_NK = (score_NK.astype(float) - scale.offset) / scale.temperature
    assert mean_loss(score_NK, target_NK, "softmax", scale) == pytest.approx(
        log_loss(target_NK.argmax(1), special.softmax(logit_NK, axis=1), labels=range(5)), rel=1e-9
    )
    expected = F.binary_cross_entropy_with_logits(
        torch.from_numpy(logit_NK), torch.tensor(target_NK).double()
    )
    found = mean_loss(score_NK, target_NK, "sigmoid", scale)
    assert found == pytest.approx(5 * expected.item(), rel=1e-9)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_scores_without_a_best_temperature_are_refused(loss: Loss) -> None:
    right = np.eye(3, dtype=np.float32)
    with pytest.raises(DataError, match="separate the classes of all 3 images"):
        fit_scale(right, np.eye(3, dtype=int), loss)
    with pytest.raises(DataError, match="do not tell their classes apart"):
        fit_scale(-right, np.eye(3, dtype=int), loss)
    with pytest.raises(DataError, match="do not tell their classes apart"):
        fit_scale(np.full((4, 3), 2.0, np.float32), np.eye(3, dtype=int)[[0, 1, 2, 0]], loss)


@pytest.mark.parametrize("decimals", [1, 2, 8])
@pytest.mark.parametrize("seed", range(4))
def test_thresholds_are_the_best_of_all_cuts(seed: int, decimals: int) -> None:
    rng = np.random.Generator(np.random.PCG64(seed))
    on_N = rng.random(60) < 0.3
    p_N = np.clip(rng.normal(0.3 + 0.2 * on_N, 0.2), 0, 1).round(decimals).astype(np.float32)
    cuts = [-1.0, *np.unique(p_N).tolist()]
    found = fit_threshold(p_N, on_N, None)
    best = max(f1_score(on_N, p_N > t, zero_division=0) for t in cuts)
    assert f1_score(on_N, p_N > found) == pytest.approx(best, abs=1e-12)
    assert found not in p_N.tolist() or found == 0, "no image is on the threshold"
    for recall in (0.01, 0.5, 0.9, 1.0):
        found = fit_threshold(p_N, on_N, recall)
        larger = [t for t in cuts if (p_N > t).sum() < (p_N > found).sum()]
        assert recall_score(on_N, p_N > found) >= recall or (p_N[on_N] == 0).any()
        assert all(recall_score(on_N, p_N > t) < recall for t in larger)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    folder = tmp_path_factory.mktemp("stores")
    return {
        "private": write_digits(folder / "private", 0, 600),
        "public": write_digits(folder / "public", 600, 1000, public=True),
        "several": write_several(folder / "several", 0, 600),
        "several public": write_several(folder / "several_public", 600, 1000, public=True),
    }


def test_a_head_is_calibrated_on_public_images_and_loads_so(
    stores: dict[str, Store], tmp_path: Path
) -> None:
    run = run_head(head_config(stores["private"], "many_steps"), tmp_path / "run")
    before = load_classifier(run)
    with pytest.raises(PrivacyError, match="covered by no plan"):
        calibrate(run, stores["private"])
    with pytest.raises(ConfigError, match=r"recall=0\.9 with a run of one class per image"):
        calibrate(run, stores["public"], recall=0.9)
    with pytest.raises(ConfigError, match="recall=nan; expected above 0"):
        calibrate(run, stores["public"], recall=float("nan"))
    assert not (run / "calibration.json").exists()
    made = calibrate(run, stores["public"], workers=1)
    assert made.path == run / "calibration.json" and made.visibility == "public"
    after = load_classifier(run)
    assert after.temperature == made.calibration.temperature != before.temperature == 1
    assert made.calibration.loss_after < made.calibration.loss_before
    about = made.calibration.store
    assert (about["store_id"], about["images"]) == (stores["public"].store_id, 400)
    x_BCHW = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(after(x_BCHW), before(x_BCHW)), "scores stay"
        np.testing.assert_allclose(
            after.probabilities(x_BCHW),
            special.softmax(before(x_BCHW).double() / after.temperature, axis=1),
            atol=1e-6,
        )


@pytest.mark.parametrize("recall", [None, 0.9])
def test_a_multi_label_run_gets_thresholds(
    stores: dict[str, Store], tmp_path: Path, recall: float | None
) -> None:
    run = run_head(several_config(stores["several"], "least_squares"), tmp_path / "run")
    plain = load_classifier(run)
    assert plain.thresholds_K == pytest.approx((special.expit(0.5),) * NUM_CLASSES)
    store = stores["several public"]
    before = score_own_head(run, store, workers=1)[1].value
    made = calibrate(run, store, recall=recall, workers=1).calibration
    classifier = load_classifier(run)
    assert classifier.thresholds_K == made.thresholds and made.thresholds is not None
    x_BCHW = torch.from_numpy(
        np.stack([classifier.preprocess(store.read(row)) for row in range(store.num_records)])
    )
    with torch.no_grad():
        probability_NK = classifier.probabilities(x_BCHW).numpy()
    target_NK = store.targets(np.arange(store.num_records), NUM_CLASSES)
    scored = score_own_head(run, store, workers=1)[1]
    decided_NK = probability_NK > np.array(made.thresholds)
    assert scored.value == pytest.approx((decided_NK == target_NK).mean(), abs=0.005)
    assert scored.protocol.endswith(f"centre crop, thresholds fitted here, of {made.rule}")
    assert abs(scored.value - before) > 0.01, "predict's decisions, not its own"
    for k in np.flatnonzero(target_NK.any(axis=0)).tolist():
        said_N = probability_NK[:, k] > made.thresholds[k]
        if recall is None:
            other = max(
                f1_score(target_NK[:, k], probability_NK[:, k] > t) for t in np.linspace(0, 1, 99)
            )
            assert f1_score(target_NK[:, k], said_N) >= other - 0.02, "float32 passes differ"
        else:
            assert recall_score(target_NK[:, k], said_N) >= 0.89


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": "1"},
        {"offset": None},
        {"temperature": 1e999},
        {"thresholds": [0.5]},
        {"thresholds": [2.0] * 10},
        {"thresholds": "no"},
        {"format": "dpvision-calibration-9"},
        {"store": []},
        {"more": 1},
        {"weights": "0" * 64},
        None,
    ],
)
def test_a_file_that_is_damaged_or_for_other_weights_is_refused(
    stores: dict[str, Store], tmp_path: Path, change: dict[str, Any] | None
) -> None:
    run = run_head(head_config(stores["private"], "prototypes"), tmp_path / "run")
    calibrate(run, stores["public"], workers=1)
    path = run / "calibration.json"
    values = json.loads(path.read_text())
    path.write_text("{" if change is None else json.dumps(values | change))
    with pytest.raises(CheckpointError, match=r"calibration: .*; expected .* `dpvision calibrate`"):
        load_classifier(run)
    path.unlink()
    load_classifier(run)


@pytest.mark.parametrize("head", ["least_squares", "prototypes"])
def test_a_class_without_an_image_keeps_the_runs_own_threshold(
    stores: dict[str, Store], tmp_path: Path, head: str
) -> None:
    """No image has the class of the nines."""
    run = run_head(several_config(stores["several"], head), tmp_path / "run")
    if head == "prototypes":
        with pytest.raises(DataError, match="1 of 12 classes have no image; expected"):
            calibrate(run, stores["several public"], workers=1)
        assert load_classifier(run).thresholds_K is None
        return
    made = calibrate(run, stores["several public"], workers=1).calibration
    assert made.thresholds is not None
    own = special.expit((0.5 - made.offset) / made.temperature)
    assert made.thresholds[9] == pytest.approx(own)
    assert made.rule == "largest F1; the run's own for 1 classes without an image"
