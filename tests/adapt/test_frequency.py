"""Factors of spatial frequencies: public, bounded, and the same in training and prediction."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from feature_sets import no_noise, releases_of

from dpvision.adapt.defaults import STEEPEST, TEXTURE_SHARE, frequency_decay, frequency_scale
from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.heads.many_steps import many_steps
from dpvision.adapt.prepare import prepare
from dpvision.adapt.release import full_batch_plan
from dpvision.adapt.session import feature_stream
from dpvision.cli.head_text import head_text
from dpvision.config import HeadConfig, RunConfig, with_settings
from dpvision.data.store import Store
from dpvision.encoders.fixed import fixed_encoder
from dpvision.errors import ConfigError
from dpvision.synthetic.textures import textures

from .runs_of_heads import head_config, write_digits


def test_less_noise_never_means_a_steeper_decay() -> None:
    by_epsilon = [
        frequency_decay(full_batch_plan(5000, e, steps=60)) for e in (0.01, 0.1, 1, 3, 10, 20)
    ]
    by_count = [
        frequency_decay(full_batch_plan(n, 1.0, steps=60)) for n in (10, 300, 5000, 10**5, 10**7)
    ]
    for decays in (by_epsilon, by_count):
        assert (
            decays == sorted(decays, reverse=True)
            and 0.99 * STEEPEST < decays[0] < STEEPEST
            and decays[-1] == 1
        )
    # Noise alone decides, however the budget is cut into steps.
    assert frequency_decay(full_batch_plan(5000, 1.0, steps=7)) == pytest.approx(
        frequency_decay(full_batch_plan(5000, 1.0))
    )
    assert frequency_decay(no_noise(100, steps=60)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("decay", [1.5, 4.0])
def test_scaled_rows_of_textures_have_about_length_one(decay: float) -> None:
    """The energies that the constants claim, on textures beyond those that shaped the encoder."""
    encoder = fixed_encoder("patches+scattering", 64)
    assert encoder.order_D is not None
    for side in (32, 64):
        row_BD = encoder.poolings(textures(torch.arange(70_000, 70_024), side).float() / 255)["3x3"]
        share_F = torch.stack(
            [row_BD[:, encoder.order_D == f].square().sum(1).mean() for f in range(4)]
        )
        assert share_F.tolist() == pytest.approx(TEXTURE_SHARE, abs=0.05)
        scale_D = frequency_scale(encoder.order_D, decay)
        assert scale_D is not None
        assert float((row_BD * scale_D).square().sum(1).mean()) == pytest.approx(1, abs=0.1)
        assert float(
            scale_D[encoder.order_D == 0][0] / scale_D[encoder.order_D == 3][0]
        ) == pytest.approx(decay**1.5)
    assert frequency_scale(encoder.order_D, 1.0) is None


def test_scaled_features_and_a_scaled_stream_give_the_same_head() -> None:
    rng = np.random.default_rng(0)
    feature_ND, label_N = rng.normal(size=(200, 12)).astype(np.float32), rng.integers(0, 3, 200)
    scale_D = torch.linspace(0.2, 1.7, 12)
    unit_ND = feature_ND / np.linalg.norm(feature_ND, axis=1, keepdims=True)
    plan = full_batch_plan(200, 8.0, steps=5)
    scaled = FeatureStream(feature_ND, label_N, 3, unit=True, scale_D=scale_D, constant=0.1)
    by_hand = FeatureStream(unit_ND * scale_D.numpy(), label_N, 3, constant=0.1)
    head, other = (many_steps(stream, releases_of(plan)).last for stream in (scaled, by_hand))
    scores = head.scores(torch.from_numpy(feature_ND))
    torch.testing.assert_close(
        scores, other.scores(torch.from_numpy(unit_ND) * scale_D), atol=1e-3, rtol=1e-3
    )
    # The public bound on a row's length holds, and is reached by a row along the longest dimension.
    longest = np.eye(12, dtype=np.float32)[[11, 0]]
    stream = replace(scaled, feature_ND=longest, label=np.array([0, 1]))
    norms = next(stream.blocks()).norm_B
    assert (
        scaled.longest_row == pytest.approx(float(norms[0]))
        and (norms <= scaled.longest_row * (1 + 1e-6)).all()
    )


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("store") / "digits", 0, 40)


def _at_32_px(config: RunConfig) -> RunConfig:
    assert isinstance(config.model, HeadConfig)
    return replace(
        config, model=replace(config.model, encoder=replace(config.model.encoder, image_size=32))
    )


@pytest.mark.slow
def test_a_run_scales_by_its_own_plan_and_says_so(digits: Store) -> None:
    config = head_config(digits, "many_steps", spec="patches")
    config = _at_32_px(config)
    made = prepare(config)
    decay = frequency_decay(made.plan)
    assert (
        made.model.features.frequency_decay == decay > 3
        and f"divided by {decay:.3g}" in head_text(made)
    )
    assert made.encoder.order_D is not None
    expected_D, scale_D = frequency_scale(made.encoder.order_D, decay), feature_stream(made).scale_D
    assert expected_D is not None and scale_D is not None and torch.equal(scale_D, expected_D)
    typed = prepare(with_settings(config, {"model.frequency_decay": 1.0}))  # type: ignore[type-var]
    assert (
        typed.model.features.frequency_decay == 1
        and feature_stream(typed).scale_D is None
        and "frequencies" not in head_text(typed)
    )
    for head, spec in (("prototypes", "patches"), ("many_steps", "hog")):
        other = prepare(_at_32_px(head_config(digits, head, spec=spec)))
        assert other.model.features.frequency_decay == 1


def test_a_decay_below_one_is_refused(digits: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"frequency_decay=0.5; expected 1 or more"):
        with_settings(head_config(digits), {"model.frequency_decay": 0.5})
