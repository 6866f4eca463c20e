"""The law of the noise and of the draws, on what steps released: by sampling, precision, ranks,
after a resume, of records and of people.

The step is the product's (``audit.canaries``); the noise is the release minus the sum that the
auditor computes by autograd, record by record.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from dpvision.audit.canaries import CanaryRun, network_run, weights_run
from dpvision.config import RunConfig
from dpvision.data.people import People
from dpvision.dp.noise import grid_of
from dpvision.privacy.stream import Keystream
from dpvision.train.distributed import Group

from ..mutants.ranks import Ranks
from .laws import (
    LAWS,
    RATIO,
    SHIFT,
    broken_draw_laws,
    broken_noise_laws,
    noise_of,
    numbers_needed,
    privacy,
)

ALONE = Group(0, 1, torch.device("cpu"))


def network(config: RunConfig, law: str, precision: str, group: Group = ALONE) -> CanaryRun:
    config = replace(config, hardware=replace(config.hardware, precision=precision))
    return network_run(config, privacy(law, 16), 20, group)


@pytest.mark.parametrize(
    ("law", "precision"),
    [
        ("poisson", "float32"),
        ("truncated", "bfloat16"),
        ("full batch", "float16"),
        pytest.param("poisson", "bfloat16", marks=pytest.mark.slow),
        pytest.param("poisson", "float16", marks=pytest.mark.slow),
        pytest.param("truncated", "float32", marks=pytest.mark.slow),
        pytest.param("truncated", "float16", marks=pytest.mark.slow),
        pytest.param("full batch", "float32", marks=pytest.mark.slow),
        pytest.param("full batch", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_noise_in_a_release_is_normal_of_the_plans_scale_and_never_repeats(
    config: RunConfig, law: str, precision: str
) -> None:
    run = network(config, law, precision)
    assert broken_noise_laws(noise_of(run), list(run.parameters.values())) == []


@pytest.mark.parametrize(
    ("law", "precision"),
    [
        ("poisson", "float32"),
        ("full batch", "float32"),
        pytest.param("truncated", "float32", marks=pytest.mark.slow),
        *(
            pytest.param(law, precision, marks=pytest.mark.slow)
            for law in LAWS
            for precision in ("bfloat16", "float16")
        ),
    ],
)
def test_two_ranks_release_one_noise_of_the_same_law(
    config: RunConfig, law: str, precision: str
) -> None:
    def work(group: Group) -> tuple[np.ndarray, list[slice]]:
        run = network(config, law, precision, group)
        return noise_of(run), list(run.parameters.values())

    (first, parameters), (second, _) = Ranks(2).run(work)
    assert np.array_equal(first, second)
    assert broken_noise_laws(first, parameters) == []


def test_a_second_start_of_a_run_shares_no_noise_with_the_first(config: RunConfig) -> None:
    """As after a resume: new keys, the same step numbers."""
    first, second = (network(config, "full batch", "float32") for _ in range(2))
    together = np.concatenate([noise_of(first)[:8], noise_of(second)[:8]])
    assert broken_noise_laws(together, list(first.parameters.values())) == []


FAULTS = {
    "mean": lambda x: x + SHIFT,
    "variance": lambda x: x * math.sqrt(RATIO),
    "distribution": lambda x: np.random.default_rng(1).laplace(scale=math.sqrt(0.5), size=x.shape),
    "tails": lambda x: np.clip(x, -3, 3),
    "steps": lambda x: np.concatenate([x[:-1], x[:1]]),
    "neighbours": lambda x: np.repeat(x[:, ::2], 2, axis=1),
    "parameters": lambda x: np.concatenate([x[:, :1000], x[:, :1000], x[:, 2000:]], axis=1),
    "shares of two ranks": lambda x: np.concatenate([x[:, :1500], x[:, :1500]], axis=1),
}


@pytest.mark.parametrize("law", FAULTS)
def test_the_laws_of_noise_have_the_power_that_is_claimed(law: str) -> None:
    """As few numbers as needed reject a shift of 0.0375 standard deviations and a variance of
    1.0625, ten times of ten; a miss has a probability of 0.001.
    """
    parameters = [slice(0, 1000), slice(1000, 2000), slice(2000, 3000)]
    if law == "shares of two ranks":
        parameters = [slice(0, 3000)]
    steps = math.ceil(numbers_needed() / 3000)
    for seed in range(10 if law in ("mean", "variance") else 2):
        x = np.random.default_rng(seed).standard_normal((steps, 3000))
        assert broken_noise_laws(x, parameters) == []
        assert law in broken_noise_laws(FAULTS[law](x), parameters), seed


def test_tails_of_a_release_beyond_six_standard_deviations(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every radius' word divided by 2^30: pairs beyond 6.4 standard deviations, as one in 10^9 is.

    Half their squares are a shifted exponential. A generator of 32-bit words would stop at 6.7, one
    of 53 bits at 8.6.
    """
    run, bits, real = network(config, "full batch", "float32"), 30, Keystream.fill

    def far(stream: Keystream, word_W: np.ndarray) -> None:
        real(stream, word_W)
        word_W.view(np.uint64)[0::2] >>= np.uint64(bits)

    monkeypatch.setattr("dpvision.dp.normals.Keystream.fill", far)
    noise_TP = noise_of(run)
    pairs = np.concatenate(
        [
            noise_TP[:, s.start : s.stop - (s.stop - s.start) % 2].reshape(len(noise_TP), -1, 2)
            for s in run.parameters.values()
        ],
        axis=1,
    ).reshape(-1, 2)
    radius_square = np.square(pairs).sum(1)
    assert len(pairs) > 10_000 and radius_square.min() > 6.4**2
    half = radius_square / 2 - bits * math.log(2)
    # The known sum is float32: 1e-6 of a radius of 6.4.
    assert half.min() > -1e-4 and stats.kstest(half, "expon").pvalue > 1e-6
    assert radius_square.max() > 8.6**2 or len(pairs) < 1e5
    angle = np.arctan2(pairs[:, 1], pairs[:, 0]) / (2 * math.pi) + 0.5
    assert stats.kstest(angle, "uniform").pvalue > 1e-6


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_releases_are_on_the_grid_with_fair_last_bits(config: RunConfig, precision: str) -> None:
    run = network(config, "poisson", precision)
    grid = grid_of(run.training.plan.noise.std(0))
    released_TP = np.stack([released_P for released_P, _ in run.steps()]) / grid
    # float32 holds 24 bits: beyond 8 standard deviations the last one is rounded.
    assert np.array_equal(released_TP, np.rint(released_TP))
    small = np.abs(released_TP) < 2**23
    assert small.mean() > 0.99
    bits = (released_TP[small].astype(np.int64)[:, None] >> np.arange(8)) & 1
    assert np.abs(bits.mean(0) - 0.5).max() < stats.norm.isf(1e-7) * 0.5 / math.sqrt(len(bits))


STEPS, NUM = 700, 64
"""44,800 coins at rate 1/4: a rate of x 1.0625 is rejected (``test_the_laws_of_draws...``)."""


def drawn(
    config: RunConfig,
    law: str,
    group: Group = ALONE,
    people: bool = False,
    steps: int = STEPS,
) -> np.ndarray:
    """bool (T, N): which records, or people, were in the sum of each step."""
    settings = privacy(
        law,
        steps,
        dataset_size=NUM * (3 if people else 1),
        expected_batch_size=float(NUM if law == "full batch" else NUM // 4),
        **({"num_units": NUM, "sampling_unit": "person", "max_records_per_unit": 2}
           if people else {}),
    )  # fmt: skip
    run = weights_run(config, settings, 0, group)
    if people:  # of three images each; the canaries' loss goes by a person's id
        rows = np.arange(3 * NUM)
        made = People(np.arange(1, NUM + 1), rows, np.arange(0, 3 * NUM + 1, 3), rows + 1)
        run.training.store.index["unit"] = np.repeat(made.id_P, 3)  # type: ignore[index]
        run = replace(run, training=replace(run.training, people=made))
    drawn_TN = np.stack([drawn_N for _, drawn_N in run.steps()])
    assert not drawn_TN[:, NUM:].any()
    return drawn_TN[:, :NUM]


@pytest.mark.parametrize("law", ["poisson", "truncated"])
def test_each_record_is_drawn_by_its_own_coin_in_each_step(config: RunConfig, law: str) -> None:
    most = LAWS[law].get("max_batch_size")
    assert broken_draw_laws(drawn(config, law), 0.25, most) == []


def test_each_person_is_drawn_by_a_coin_of_their_own(config: RunConfig) -> None:
    assert broken_draw_laws(drawn(config, "poisson", people=True), 0.25) == []


def test_a_full_batch_has_everyone(config: RunConfig) -> None:
    assert drawn(config, "full batch", steps=50).all()


def test_two_ranks_take_parts_of_one_draw(config: RunConfig) -> None:
    """A record drawn on both would be counted twice, one of neither never."""
    first, second = Ranks(2).run(lambda group: drawn(config, "poisson", group))
    assert np.array_equal(first, second)
    assert broken_draw_laws(first, 0.25) == []


def test_draws_after_a_resume_are_new(config: RunConfig) -> None:
    """Two starts, the same steps in turn: a draw that comes again is a pair of steps alike."""
    starts = [drawn(config, "poisson", steps=STEPS // 2) for _ in range(2)]
    assert broken_draw_laws(np.stack(starts, axis=1).reshape(-1, NUM), 0.25) == []


def test_the_laws_of_draws_have_the_power_that_is_claimed() -> None:
    rng = np.random.default_rng(0)
    shape = (STEPS, NUM)
    for _ in range(20):
        fair = rng.random(shape) < 0.25
        assert broken_draw_laws(fair, 0.25) == []
        assert "rate" in broken_draw_laws(rng.random(shape) < 0.25 * RATIO, 0.25)
        order = rng.permuted(np.tile(np.arange(NUM), (STEPS, 1)), axis=1)
        assert "sizes" in broken_draw_laws(order < NUM // 4, 0.25)
        assert "sizes" in broken_draw_laws(np.repeat(fair[:, ::2], 2, axis=1), 0.25)
        assert "pairs of records" in broken_draw_laws(np.repeat(fair[:, ::2], 2, axis=1), 0.25)
        assert "steps" in broken_draw_laws(np.repeat(fair[::2], 2, axis=0), 0.25)
        biased = fair.copy()
        biased[:, 0] |= rng.random(STEPS) < 0.25
        assert "records" in broken_draw_laws(biased, 0.25)
        head = np.stack([row & (row.cumsum() <= 16) for row in fair])  # the sorted tail is cut
        assert "places" in broken_draw_laws(head, 0.25, 16)
