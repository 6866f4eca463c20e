"""One step and many: against the paper's update written out, torch's autograd and laws of the
argmax.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from feature_sets import KEYS, clusters, joined, no_noise, private, releases_of, stream_of
from torch.nn import functional as F

from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.heads.feature_covariance import feature_covariance
from dpvision.adapt.heads.kind import Progress, Trained
from dpvision.adapt.heads.many_steps import many_steps
from dpvision.adapt.heads.one_step import one_step
from dpvision.adapt.release import Releases, full_batch_plan
from dpvision.config import OptimConfig, PrivacyConfig
from dpvision.config.heads import ManySteps, OneStep
from dpvision.errors import ConfigError
from dpvision.optim.schedule import learning_rate
from dpvision.privacy.plan import make_plan
from dpvision.privacy.sampling import derive_rng
from dpvision.privacy.stream import Key

SGD = OptimConfig(
    name="sgd", learning_rate=0.5, momentum=0.9, weight_decay=0.0, schedule="constant"
)
X = torch.from_numpy(clusters(500, seed=8)[0])
LABEL = torch.from_numpy(clusters(500, seed=8)[1])


def accuracy(head: Head) -> float:
    return float((head.predict(X) == LABEL).float().mean())


def test_from_zero_lamb_is_adam_is_the_sign_of_the_released_gradient() -> None:
    """The same noise key, the same gradient: LAMB and Adam take one step of rate x sign, momentum
    one along the gradient itself.
    """
    stream = stream_of(300)
    heads = {
        name: one_step(
            stream, private(300, 1.0), optim=replace(OneStep.optim, name=name, learning_rate=0.25)
        ).weight_KD  # type: ignore[arg-type]
        for name in ("lamb", "adamw", "sgd")
    }
    gradient_KD = -heads["sgd"] / 0.25
    torch.testing.assert_close(heads["lamb"], -0.25 * gradient_KD.sign(), rtol=1e-5, atol=0)
    torch.testing.assert_close(heads["adamw"], heads["lamb"], rtol=1e-5, atol=0)
    assert gradient_KD.abs().min() > 0


@pytest.mark.parametrize(
    ("steps", "name", "before"),
    [
        (many_steps, "lamb", 0),
        (many_steps, "adamw", 0),
        (many_steps, "sgd", 0),
        (feature_covariance, "sgd", 2),
        (feature_covariance, "adamw", 2),
    ],
)
def test_steps_in_three_starts_are_those_of_one_bit_for_bit(
    steps: Callable[..., Trained], name: str, before: int
) -> None:
    """Private steps under one noise key, from a progress written as tensors and read again;
    ``before``: releases without a step.
    """
    stream, plan = stream_of(300, constant=1.0, unit=True), full_batch_plan(300, 8.0, steps=9)
    optim = replace(SGD, name=name, ema_decay=0.8, schedule="cosine", learning_rate=0.1)  # type: ignore[arg-type]

    def trained(first: int, stop: int, start: Progress | None) -> Trained:
        releases = Releases(
            plan.another_run(),
            iter(range(first, 9)).__next__,
            *map(Key.for_tests, KEYS),
            stop=lambda: releases.left == 9 - stop,
            _next=first,
        )
        return steps(stream, releases, optim=optim, start=start)

    whole = trained(0, 9, None)
    part = trained(0, 3, None)
    for first, stop in ((3, 6), (6, 9)):
        assert part.progress.releases == first and part.progress.done == first - before
        part = trained(
            first,
            stop,
            Progress.of(first, {name: x.clone() for name, x in part.progress.tensors().items()}),
        )
    for a, b in ((whole.last, part.last), (whole.average, part.average), (whole.ema, part.ema)):
        assert a is not None and b is not None
        assert torch.equal(a.weight_KD, b.weight_KD) and torch.equal(a.bias_K, b.bias_K)
    fresh = trained(3, 9, None).last
    assert not torch.allclose(fresh.weight_KD, whole.last.weight_KD), (
        "without the progress it would be another head"
    )


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", ["lamb", "adamw", "sgd"])
def test_no_prediction_depends_on_the_rate_of_one_step(name: str, loss: str) -> None:
    """Scores are the common bias plus rate x something: nothing about the rate is left to be
    chosen, by a private score or otherwise.
    """
    stream = stream_of(300)
    predictions = []
    for rate in (1e-4, 1e-3, 0.7, 1e3):
        optim = replace(OneStep.optim, name=name, learning_rate=rate)  # type: ignore[arg-type]
        head = one_step(stream, private(300, 1.0), loss=loss, optim=optim)  # type: ignore[arg-type]
        # A bias of -10 swallows digits of tiny scores in float32: the law is about their order.
        predictions.append((X.double() @ head.weight_KD.double().T).argmax(dim=1))
    assert all(torch.equal(predictions[0], other) for other in predictions[1:])
    assert len(predictions[0].unique()) == 4


def test_the_noise_free_step_is_autograds() -> None:
    stream = stream_of(300, constant=1.0)
    weight = torch.zeros(4, 13, requires_grad=True)
    rows = torch.cat([torch.from_numpy(stream.feature_ND), torch.ones(300, 1)], dim=1)
    target = F.one_hot(torch.from_numpy(stream.label), 4).float()
    F.binary_cross_entropy_with_logits(rows @ weight.T - 3.0, target, reduction="sum").div(
        300
    ).backward()
    head = one_step(
        stream, releases_of(no_noise(300)), optim=replace(SGD, learning_rate=1.0), bias=-3.0
    )
    assert weight.grad is not None
    torch.testing.assert_close(head.weight_KD, -weight.grad[:, :-1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(head.bias_K, -3.0 - weight.grad[:, -1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("sampling", ["full_batch", "poisson"])
def test_many_noise_free_steps_are_torchs(loss: str, sampling: str) -> None:
    """Momentum with warm-up and cosine from a LeCun start, against torch.optim.SGD and autograd on
    the same draws.
    """

    stream, steps = stream_of(200), 6
    batch = 200 if sampling == "full_batch" else 60
    plan = no_noise(200, steps=steps, expected_batch_size=batch, sampling=sampling)
    optim = replace(SGD, schedule="cosine", warmup_steps=2, learning_rate=0.2)
    trained = many_steps(
        stream,
        releases_of(plan),
        loss=loss,
        optim=optim,
        bias=-1.0,
        init="lecun",
        init_scale=0.5,
        seed=3,
    )  # type: ignore[arg-type]

    start = torch.randn(4, 12, generator=torch.Generator().manual_seed(3)) * 0.5 / math.sqrt(12)
    weight = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    x, label = torch.from_numpy(stream.feature_ND), torch.from_numpy(stream.label)
    seen = []
    for t in range(steps):
        rows = torch.from_numpy(plan.draw(t, 200, derive_rng(Key.for_tests(KEYS[0]), t)))
        logit, y = x[rows] @ weight.T - 1.0, label[rows]
        if loss == "softmax":
            total = F.cross_entropy(logit, y, reduction="sum")
        else:
            total = F.binary_cross_entropy_with_logits(
                logit, F.one_hot(y, 4).float(), reduction="sum"
            )
        sgd.param_groups[0]["lr"] = learning_rate(optim, t, steps)
        sgd.zero_grad()
        (total / batch).backward()
        sgd.step()
        seen.append(weight.detach().clone())
    torch.testing.assert_close(trained.last.weight_KD, seen[-1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        trained.average.weight_KD, torch.stack(seen).mean(0), rtol=1e-4, atol=1e-5
    )
    assert not torch.equal(seen[-1], start)


def test_ema_lies_between_the_iterates_and_costs_no_release() -> None:
    stream, plan = stream_of(200), no_noise(200, steps=30)
    trained = many_steps(stream, releases_of(plan), optim=replace(SGD, ema_decay=0.9))
    assert trained.ema is not None
    plain = many_steps(stream, releases_of(plan), optim=SGD)
    assert plain.ema is None and torch.equal(plain.last.weight_KD, trained.last.weight_KD)
    gap = (trained.ema.weight_KD - trained.last.weight_KD).norm() / trained.last.weight_KD.norm()
    assert 0.01 < gap < 1


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
def test_private_steps_learn(name: str) -> None:
    stream = stream_of(2000)
    optim = replace(ManySteps.optim, name=name, learning_rate=1.0 if name == "sgd" else 0.05)  # type: ignore[arg-type]
    plans = [full_batch_plan(2000, 4.0, steps=20), no_noise(2000, steps=20, max_grad_norm=1.0)]
    private_one, noise_free = (
        many_steps(stream, releases_of(plan), loss="softmax", bias=0.0, optim=optim)
        for plan in plans
    )
    assert accuracy(private_one.last) > accuracy(noise_free.last) - 0.1 > 0.5
    assert accuracy(private_one.average) > accuracy(noise_free.average) - 0.1 > 0.5


def test_a_lecun_start_loses_where_the_step_is_small_against_it() -> None:
    """The sign of the paper's table 4 and figure 2c: from zero one step is enough, from LeCun's
    start the start is what remains.
    """
    stream, adam = stream_of(2000), replace(OneStep.optim, name="adamw")
    zero, lecun, tiny = (
        many_steps(stream, private(2000, 1.0), optim=adam, init="lecun", init_scale=scale).last
        for scale in (0.0, 1.0, 1e-6)
    )
    assert accuracy(zero) > accuracy(lecun) + 0.2
    # The same key, so the noise is the same: a step so much longer than the start forgets it.
    assert accuracy(tiny) == pytest.approx(accuracy(zero), abs=0.02)


def test_lambs_step_is_as_long_as_its_start_however_small() -> None:
    """The trust ratio: only from exact zero is LAMB's step Adam's. From a tiny start the rate alone
    says what remains of the start.
    """
    stream = stream_of(2000)
    small, tiny = (
        many_steps(
            stream,
            private(2000, 1.0),
            optim=replace(OneStep.optim, learning_rate=0.3),
            init="lecun",
            init_scale=scale,
            bias=0.0,
        ).last
        for scale in (1e-5, 1e-9)
    )
    torch.testing.assert_close(small.weight_KD / 1e-5, tiny.weight_KD / 1e-9, rtol=1e-2, atol=1e-3)


def test_several_labels_are_learned_by_the_sigmoid_loss() -> None:
    x, _ = clusters(3000, width=12)
    label_NK = (x[:, :4] > 0).astype(np.uint8)
    stream = FeatureStream(x, label_NK, 4, constant=1.0)
    trained = many_steps(
        stream,
        private(3000, 4.0, steps=10),
        loss="sigmoid",
        optim=replace(SGD, learning_rate=5.0, momentum=0.0),
    )
    test_x, _ = clusters(500, width=12, seed=5)
    right = (trained.last.scores(torch.from_numpy(test_x)).numpy() > 0) == (test_x[:, :4] > 0)
    assert right.mean() > 0.85
    with pytest.raises(ConfigError, match="sigmoid"):
        many_steps(stream, private(3000), loss="softmax")


def test_an_empty_poisson_draw_is_a_step_like_any_other() -> None:
    asked = PrivacyConfig(
        dataset_size=40,
        expected_batch_size=0.5,
        steps=12,
        noise_multiplier=2.0,
        guarantee="simulated",
    )
    plan = make_plan(asked)
    assert any(
        len(plan.draw(step, 40, derive_rng(Key.for_tests(KEYS[0]), step))) == 0
        for step in range(12)
    )
    releases = releases_of(plan)
    trained = many_steps(stream_of(40), releases, optim=SGD)
    assert releases.left == 0 and torch.isfinite(trained.last.weight_KD).all()


def test_a_broken_record_does_not_change_a_head_by_a_bit() -> None:
    stream = stream_of(200)
    broken = joined(joined(stream, np.full(12, np.nan), 0), np.ones(12), 77)
    for steps in (1, 5):
        plan = full_batch_plan(200, 2.0, steps=steps)
        a, b = (many_steps(s, releases_of(plan)).last.weight_KD for s in (stream, broken))
        assert torch.equal(a, b)


def test_a_head_scores_as_the_rows_it_was_trained_on() -> None:
    """Centre, length, constant and map, folded into one linear map, give the scores of the stream's
    own rows.
    """
    gen = torch.Generator().manual_seed(0)
    for unit in (False, True):
        stream = stream_of(50, centre_D=torch.randn(12, generator=gen), unit=unit, constant=0.7)
        stream = stream.mapped(torch.randn(13, 13, generator=gen)).mapped(
            torch.randn(13, 13, generator=gen)
        )
        weight_KE, bias_K = torch.randn(4, 13, generator=gen), torch.randn(4, generator=gen)
        (block,) = stream.blocks()
        scores = stream.head(weight_KE, bias_K).scores(torch.from_numpy(stream.feature_ND))
        torch.testing.assert_close(scores, block.x_BE @ weight_KE.T + bias_K, rtol=1e-4, atol=1e-4)


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps=3"):
        one_step(stream_of(50), private(50, steps=3))
    releases = private(50)
    one_step(stream_of(50), releases)
    with pytest.raises(ConfigError, match="at least one step"):
        many_steps(stream_of(50), releases)
