"""Attacks through the Python API: what an ordinary mistake, or a hand that edits, could do to the
guarantee without a word.

Each succeeded before keys, sums, gradients and plans were told apart from what is made by hand
(decision 0039).
"""

import copy
import dataclasses
import functools
import io
import multiprocessing
import os
import pickle
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dpvision import PrivacyConfig, clipped_sum, make_plan, privatize
from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.moments import moment_sum
from dpvision.config import OptimConfig
from dpvision.data.batch import Batch
from dpvision.data.decode import decode
from dpvision.data.keys import StepKey
from dpvision.dp.clip import ClippedSum
from dpvision.dp.noise import DPGradient
from dpvision.errors import PrivacyError
from dpvision.optim.optimizer import Optimizer
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.sampling import derive_rng
from dpvision.privacy.stream import new_key, subkey
from dpvision.runs.run import Secrets

KEY, C = StepKey(0, 0), 1.0
POISSON = PrivacyConfig(dataset_size=1000, expected_batch_size=10, steps=10, noise_multiplier=2.0)
FULL = PrivacyConfig(
    dataset_size=3,
    expected_batch_size=3,
    steps=10,
    noise_multiplier=20.0,
    sampling="full_batch",
    delta=1e-3,
)
TWICE = "a record is twice in a sum"


class Linear(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(width))


def dot(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    """The gradient of a record is its image, averaged over its views."""
    return (batch.image_BVCHW[:, :, 0, 0, :] * model.w).sum(2).mean(1)


def batch_of(num: int, ids: list[int] | None = None, views: int = 1) -> Batch:
    return Batch(
        torch.tensor(ids or list(range(num))),
        torch.ones(num, dtype=torch.bool),
        torch.ones(num, views, 3, 1, 4),
    )


def summed(
    num: int = 3, model: nn.Module | None = None, step: int = 0, **settings: Any
) -> ClippedSum:
    return clipped_sum(
        dot,
        model or Linear(),
        batch_of(num, **settings),
        StepKey(0, step),
        max_grad_norm=C,
        rows=16,
    )


def drawn(plan: DPPlan, step: int, at_least: int = 3) -> DPPlan:
    """The plan of another run, after it drew a batch of at least so many records for the step."""
    plan = plan.another_run()
    while len(plan.draw(step, 1000, derive_rng(new_key(), step))) < at_least:
        plan = plan.another_run()
    return plan


# Records


def test_a_record_twice_in_a_batch_is_refused() -> None:
    """It moved the sum by 2 C."""
    with pytest.raises(PrivacyError, match=TWICE):
        summed(ids=[7, 8, 7])
    for method in ("one_pass", "vmap"):
        with pytest.raises(PrivacyError, match=TWICE):
            clipped_sum(dot, Linear(), batch_of(3, [7, 8, 7]), KEY, max_grad_norm=C, method=method)


@pytest.mark.parametrize(
    "add",
    [lambda a, b: a + b, lambda a, b: ClippedSum.add_up(Linear(), C, [a, b])],
    ids=["+", "add_up"],
)
def test_a_record_twice_in_a_steps_total_is_refused(
    add: Callable[[ClippedSum, ClippedSum], ClippedSum],
) -> None:
    first, second = summed(), summed(ids=[10, 11, 12])
    assert add(first, second).num_records == 6
    for again in (first, summed(ids=[20, 21, 2]), add(second, first)):
        with pytest.raises(PrivacyError, match=TWICE):
            add(first, again)


def test_padding_and_views_are_not_duplicates() -> None:
    """A padding row is a copy of a record; several views of a record are one row."""
    padded = batch_of(3, [5, 6, 5])._replace(valid_B=torch.tensor([True, True, False]))
    assert clipped_sum(dot, Linear(), padded, KEY, max_grad_norm=C).num_records == 2
    assert summed(views=4).num_records == 3
    open_sum = clipped_sum(dot, Linear(), batch_of(3, [7, 7, 7]), KEY, max_grad_norm=None)
    assert open_sum.num_records == (open_sum + open_sum).num_records / 2, (
        "without a clip there is nothing to void"
    )


def test_a_record_twice_in_a_heads_sum_is_refused() -> None:
    stream = FeatureStream(
        np.ones((5, 4), dtype=np.float32), np.zeros(5, dtype=np.int64), 2, unit=True
    )
    plan = make_plan(dataclasses.replace(FULL, dataset_size=5, expected_batch_size=5))

    def total(rows: list[int]) -> ClippedSum:
        return moment_sum(stream.blocks(np.array(rows)), 4, 2, 1.0, 0.5, plan)

    assert (total([0, 1]) + total([2, 4])).num_records == 4
    for twice in (lambda: total([0, 1, 1]), lambda: total([0, 1]) + total([1, 2])):
        with pytest.raises(PrivacyError, match=TWICE):
            twice()


# Noise


def test_the_noise_of_a_step_is_drawn_once_under_a_key() -> None:
    """The difference of two releases with one noise was the difference of the sums, without any:
    also for another model of other size, whose noise is the beginning of the same stream, or of
    other names, which is a second release that nothing accounts for.
    """
    plan, key = make_plan(FULL), new_key()
    privatize(summed(), plan.another_run(), 0, key)
    other = Linear()
    other.v = nn.Parameter(torch.zeros(4))
    frozen = Linear()
    frozen.v, frozen.w = (
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.zeros(4), requires_grad=False),
    )
    for again in (
        summed(),
        summed(2),
        summed(model=other),
        ClippedSum.zeros(Linear(9), C),
        ClippedSum.zeros(frozen, C),
    ):
        with pytest.raises(PrivacyError, match="not drawn under this key before"):
            privatize(again, plan.another_run(), 0, key)
    assert (
        privatize(summed(step=1), plan, 1, key).grads["w"].any()
        and privatize(summed(), plan, 0, new_key()).grads["w"].any()
    )


def test_a_derived_or_handed_over_key_shares_the_memory_of_the_first() -> None:
    """A subkey that was made twice, or a key that was handed over, had forgotten what was released:
    the same noise came again.
    """
    key = new_key()
    for path in ([], ["noise"], ["noise", "of a run"]):

        def derived(path: list[str] = path) -> Any:
            return functools.reduce(subkey, path, key)

        derived().spend(0)
        with pytest.raises(PrivacyError, match="step=0"):
            derived().spend(0)
        derived().spend(1)
        subkey(derived(), "noise", run=1).spend(0)
    handed = key.hand_over(lambda secret: secret)
    for again in (handed, subkey(handed, "noise")):
        with pytest.raises(PrivacyError, match="step=1"):
            again.spend(1)
    handed.spend(2)


def test_a_step_is_released_once_by_a_plan_under_whatever_key() -> None:
    """Three releases of one step, each with noise of its own, are three steps; the plan's epsilon
    is that of one.
    """
    for config in (FULL, POISSON):
        plan = drawn(make_plan(config), 0) if config is POISSON else make_plan(config)
        privatize(summed(), plan, 0, new_key())
        with pytest.raises(
            PrivacyError, match=r"step=0; expected a step that this plan did not release before"
        ):
            privatize(summed(), plan, 0, new_key())
        privatize(summed(), plan.another_run() if config is FULL else drawn(plan, 0), 0, new_key())


def test_the_sum_or_the_batch_of_a_step_is_released_in_no_other_step() -> None:
    """After an error that was caught, 49 of 50 steps released one batch: 6.4 where 0.076 was
    printed.
    """
    plan = make_plan(POISSON)
    for step in range(2):
        while len(plan.draw(step, 1000, derive_rng(new_key(), step))) < 3:
            plan = plan.another_run()
    old = summed()
    for stale in (old, ClippedSum.add_up(Linear(), C, [old])):
        with pytest.raises(PrivacyError, match="step=1 with a sum of step 0"):
            privatize(stale, plan, 1, new_key())
    with pytest.raises(PrivacyError, match="sums of steps 0 and 1"):
        old + clipped_sum(
            dot, Linear(), batch_of(3, [7, 8, 9]), StepKey(0, 1), max_grad_norm=C, rows=16
        )

    large = make_plan(dataclasses.replace(POISSON, expected_batch_size=100))

    def release(step: int, first: int) -> None:
        large.draw(step, 1000, derive_rng(new_key(), step))
        batch = batch_of(40, list(range(first, first + 40)))
        privatize(
            clipped_sum(dot, Linear(), batch, StepKey(0, step), max_grad_norm=C, rows=40),
            large,
            step,
            new_key(),
        )

    release(0, 1)
    release(1, 501)
    with pytest.raises(PrivacyError, match="more records with an earlier one than their draws"):
        release(2, 1)


def test_draws_of_two_steps_or_plans_do_not_share_a_stream() -> None:
    """With the step forgotten all 50 batches were one; with one draw key two plans had the same
    batches.
    """
    plan, key = make_plan(POISSON), new_key()
    plan.draw(0, 1000, derive_rng(key, 0))
    for step, run in ((1, plan), (0, plan.another_run())):
        with pytest.raises(PrivacyError, match=f"step={step}; expected the stream of this step"):
            run.draw(step, 1000, derive_rng(key, 0))
    plan.draw(1, 1000, derive_rng(key, 1))


def test_a_full_batch_has_no_more_records_than_were_declared() -> None:
    """Three copies of each image with ids of their own: 3 C a record."""
    plan = make_plan(FULL)
    for release in (
        lambda: plan.draw(0, 4, derive_rng(new_key(), 0)),
        lambda: privatize(summed(4), plan, 0, new_key()),
    ):
        with pytest.raises(
            PrivacyError, match="a full batch of 4 records; expected at most the 3 declared"
        ):
            release()


def test_a_copy_of_a_plan_remembers_what_was_released() -> None:
    plan = make_plan(FULL)
    privatize(summed(), plan, 0, new_key())
    for copied in (copy.copy(plan), copy.deepcopy(plan), copy.deepcopy([plan])[0]):
        with pytest.raises(PrivacyError, match="did not release before"):
            privatize(summed(), copied, 0, new_key())


def test_the_text_of_a_sum_shows_nothing() -> None:
    assert repr(summed()) == "<secret sum of clipped gradients>"


def test_a_step_is_drawn_once_by_a_plan() -> None:
    """Drawn again until record 7 was in the batch, it was in 50 of 50 steps at rate 0.01; drawn
    again while empty, the batches' sizes were not those of the accounting.
    """
    plan = make_plan(POISSON)
    plan.draw(0, 1000, derive_rng(new_key(), 0))
    with pytest.raises(PrivacyError, match="step=0; expected a step that was not drawn before"):
        plan.draw(0, 1000, derive_rng(new_key(), 0))
    plan.draw(1, 1000, derive_rng(new_key(), 1))


def test_a_draw_by_another_plan_than_the_noise_is_refused() -> None:
    plan, other = (
        make_plan(POISSON),
        make_plan(dataclasses.replace(POISSON, expected_batch_size=500)),
    )
    drawn(other, 0)
    for by in (plan, drawn(plan, 1)):
        with pytest.raises(
            PrivacyError, match=r"that the plan of the noise drew, at sample rate 0\.01"
        ):
            privatize(summed(), by, 0, new_key())
    assert privatize(summed(), drawn(plan, 0), 0, new_key()).grads["w"].any()
    with pytest.raises(PrivacyError, match="that the plan of the noise drew"):
        privatize(
            summed(30, step=1), drawn(plan, 1), 1, new_key()
        )  # it drew some, but not these thirty


CHANGES = [
    {"noise_multiplier": 1e-6},
    {"noise_multiplier": 1.99},
    {"steps": 10**6},
    {"steps": 9},
    {"delta": 1e-3},
    {"epsilon": 0.5},
    {"expected_batch_size": 20.0, "sample_rate": 0.02},
    {"dataset_size": 2000, "sample_rate": 0.005},
    {"sampling": "full_batch"},
    {"max_records_per_unit": 2, "num_units": 500},
    {"epsilon_rdp": 0.1},
    {"sampling": "truncated_poisson", "max_batch_size": 10},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_plan_that_was_changed_draws_and_releases_nothing(change: dict[str, Any]) -> None:
    """``dataclasses.replace`` left the epsilon as it was: 1.0 was printed for a noise multiplier of
    a millionth.
    """
    plan = make_plan(POISSON)
    read = DPPlan.from_dict({**plan.to_dict(), **change})
    fields = {field.name: getattr(read, field.name) for field in dataclasses.fields(read)}
    for changed in (dataclasses.replace(plan, **fields), read):
        with pytest.raises(
            PrivacyError,
            match=r"plan: \w+=.*, but its numbers give .*; expected the same. "
            r"Make a plan with make_plan",
        ):
            changed.draw(0, 1000, derive_rng(new_key(), 0))
        with pytest.raises(PrivacyError, match="but its numbers give"):
            privatize(summed(), changed, 0, new_key())
    drawn(plan, 0)


def test_a_plan_from_its_own_file_is_executed() -> None:
    plan = DPPlan.from_dict(make_plan(POISSON).to_dict())
    assert privatize(summed(), drawn(plan, 0), 0, new_key()).grads["w"].any()


# What the mechanism did not make


def edited(total: ClippedSum) -> list[ClippedSum]:
    """The same type by hand, in every way that does not reach into private attributes."""
    w = total.grads["w"]
    inner, outer, view, extra = (summed() for _ in range(4))
    inner.grads["w"].mul_(100)
    outer.grads["w"] = 100 * w
    view.grads["w"].view(-1)[0] = 100
    extra.grads["v"] = w
    return [
        ClippedSum({"w": 100 * w}, 3, total.norms_B, total.losses_B, C),
        ClippedSum(dict(total.grads), 3, total.norms_B, total.losses_B, C),
        dataclasses.replace(total, grads={"w": 100 * w}),
        dataclasses.replace(summed(), max_grad_norm=C),
        inner,
        outer,
        view,
        extra,
    ]


def test_a_sum_that_was_made_or_edited_by_hand_is_neither_added_nor_released() -> None:
    plan, total, summed_before = make_plan(FULL), summed(), summed(ids=[20, 21, 22])
    with torch.inference_mode(), pytest.raises(PrivacyError, match=r"under torch\.inference_mode"):
        total + summed_before  # tensors that do not count writes: edited by any amount, it passed
    for i, wrong in enumerate(edited(total)):
        with pytest.raises(PrivacyError, match="ClippedSum made or edited by hand"):
            privatize(wrong, plan, 0, new_key())
        other = summed(ids=[10, 11, 12])
        for add in (
            lambda a, b: a + b,
            lambda a, b: b + a,
            lambda a, b: ClippedSum.add_up(Linear(), C, [b, a]),
        ):
            with pytest.raises(PrivacyError, match="ClippedSum made or edited by hand"):
                add(wrong, other)
        assert i < 8
    privatize(total, plan, 0, new_key())


def test_a_gradient_that_was_made_or_edited_by_hand_trains_nothing() -> None:
    plan, model = make_plan(FULL), Linear()
    inner, outer = (privatize(summed(step=step), plan, step, new_key()) for step in range(2))
    inner.grads["w"].zero_()
    outer.grads["w"] = summed().grads["w"]
    optimizer = Optimizer(OptimConfig(), model)
    for wrong in (
        DPGradient(dict(summed().grads)),
        dataclasses.replace(inner, grads=summed().grads),
        inner,
        outer,
    ):
        with pytest.raises(PrivacyError, match="DPGradient made or edited by hand"):
            optimizer.step(wrong, 1.0)
    assert not model.w.any()
    optimizer.step(privatize(summed(step=2), plan, 2, new_key()), 1.0)
    assert model.w.any()


def test_sums_of_other_shapes_or_names_are_not_broadcast() -> None:
    """One number was added to each of 10,000 elements: a record moved the sum by 99.5 C."""
    one = clipped_sum(
        lambda m, b, k: b.image_BVCHW[:, 0, 0, 0, 0] * m.w.sum(),
        Linear(1),
        batch_of(1),
        KEY,
        max_grad_norm=C,
        rows=16,
    )
    other = Linear()
    other.v = nn.Parameter(torch.zeros(4))
    for add in (
        lambda: ClippedSum.add_up(Linear(4), C, [one]),
        lambda: summed() + one,
        lambda: ClippedSum.add_up(other, C, [summed()]),
    ):
        with pytest.raises(PrivacyError, match="expected the same"):
            add()


def test_the_ids_of_a_sum_cannot_be_written_to() -> None:
    """Other ids, and the same record could be added again."""
    for total in (summed(), summed() + summed(ids=[10, 11, 12])):
        with pytest.raises(ValueError, match="read-only"):
            total.record_id_B[:] += 100


# Processes


def _in_a_fork(work: Callable[[], object]) -> str:
    """What ``work`` raises or returns in a forked child."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child() -> None:
        try:
            queue.put(f"returned {type(work()).__name__}")
        except Exception as error:
            queue.put(f"{type(error).__name__}: {error}")

    process = context.Process(target=child)
    process.start()
    process.join(timeout=900)
    return queue.get()


def test_a_key_is_dead_in_a_forked_child_and_lives_on_in_its_parent() -> None:
    """Two children added the same noise; so did what was derived from a key before the fork."""
    plan, total, secrets, key = make_plan(FULL), summed(), Secrets(), new_key()
    stream = derive_rng(key, 0)
    uses = [
        lambda: privatize(total, plan.another_run(), 0, secrets.noise),
        lambda: derive_rng(secrets.draw, 0),
        lambda: stream.words(1),
        lambda: copy.copy(key),
        lambda: key.hand_over(lambda secret: secret),
    ]
    for use in uses:
        assert _in_a_fork(use).startswith("PrivacyError: stream: a key")
    assert "forked" in _in_a_fork(uses[0]) and "forked" in _in_a_fork(uses[2])
    assert (
        _in_a_fork(lambda: privatize(total, plan.another_run(), 0, new_key()))
        == "returned DPGradient"
    ), "a key of the child's own works"
    png = io.BytesIO()
    Image.new("RGB", (8, 8)).save(png, "PNG")
    assert _in_a_fork(lambda: decode(png.getvalue())) == "returned ndarray", (
        "workers that decode images hold no key"
    )
    privatize(total, plan, 0, secrets.noise)
    stream.words(1)


def test_a_ledger_is_charged_by_its_own_process_and_by_one_thread_at_a_time(tmp_path: Path) -> None:
    """A forked child, or two threads, wrote one number twice, and the chain of lines was broken for
    good.
    """
    (tmp_path / "store").mkdir()
    (tmp_path / "store/store.json").write_text('{"store_id": "00000000000000000000000000000000"}')
    with Ledger.open(
        tmp_path / "store", "run", make_plan(dataclasses.replace(FULL, steps=60)), resume=False
    ) as ledger:
        assert _in_a_fork(ledger.append).startswith("PrivacyError: ledger: a process forked")
        with ThreadPoolExecutor(3) as pool:
            assert sorted(pool.map(lambda _: ledger.append(), range(30))) == list(range(30))
    with Ledger.open(
        tmp_path / "store", "run", make_plan(dataclasses.replace(FULL, steps=60)), resume=True
    ) as ledger:
        assert ledger.steps == 30


def test_a_key_of_a_child_is_dead_in_its_own_child() -> None:
    def grandchild() -> str:
        key = new_key()
        key.secret()
        return _in_a_fork(key.secret) if os.getppid() else ""

    def asked() -> None:
        raise RuntimeError(grandchild())

    assert "a key made before this process was forked" in _in_a_fork(asked)


def test_a_key_does_not_leave_its_process_otherwise() -> None:
    for leave in (pickle.dumps, copy.deepcopy, lambda key: torch.save(key, os.devnull)):
        with pytest.raises(PrivacyError, match="copied or pickled"):
            leave(new_key())


# Records that mix


class Centred(nn.Module):
    """Features less their mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h - h.mean(0))[:, 0]


def by_model(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    return model(batch.image_BVCHW[:, 0, 0, 0])


def contrastive(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    out = by_model(model, batch, key)
    return out - out.mean()


@pytest.mark.parametrize("method", ["one_pass", "vmap"])
@pytest.mark.parametrize(
    ("build", "loss_fn", "named"),
    [
        (Centred, by_model, "mixes records"),
        (
            lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)),
            contrastive,
            "loss function mixes records",
        ),
        (
            lambda: nn.Sequential(
                nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Flatten(0)
            ),
            by_model,
            "mixes records|statistics",
        ),
    ],
    ids=["h - h.mean(0)", "contrastive", "BatchNorm"],
)
def test_a_users_model_that_mixes_records_is_refused(
    method: str, build: Any, loss_fn: Any, named: str
) -> None:
    """By ``vmap`` it was another loss in silence; in one pass nothing was clipped as the contract
    has it.
    """
    with pytest.raises(PrivacyError, match=f"{named}|one record at a time|batch"):
        clipped_sum(loss_fn, build(), batch_of(4), KEY, max_grad_norm=C, method=method)


def test_a_zero_head_hides_no_mixing() -> None:
    model = Centred()
    nn.init.zeros_(model.head.weight)
    with pytest.raises(PrivacyError, match="mixes records"):
        clipped_sum(by_model, model, batch_of(4), KEY, max_grad_norm=C)


def test_the_check_runs_once_for_each_model_and_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpvision.dp import separable

    seen: list[object] = []
    monkeypatch.setattr(separable, "check_separable", lambda loss_fn, *rest: seen.append(loss_fn))
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0), nn.Linear(3, 1), nn.Flatten(0))

    def step(loss_fn: Any, num: int = 4, of: nn.Module = model, **settings: Any) -> int:
        clipped_sum(loss_fn, of, batch_of(num), KEY, max_grad_norm=C, method="vmap", **settings)
        return len(seen)

    assert step(by_model) == step(by_model, 7) == 1
    for _ in range(3):
        assert step(lambda m, b, k: 2.0 * by_model(m, b, k)) == 2, "a lambda in a loop is one loss"

    def calling(inner: Any) -> Any:
        return lambda m, b, k: inner(m, b, k)

    assert [step(calling(inner)) for inner in (by_model, contrastive)] == [3, 4], (
        "what a lambda calls is part of the loss"
    )
    model.eval()
    assert step(by_model) == 5, "layers in another mode"
    model[0].requires_grad_(False)
    assert step(by_model) == 6, "other parameters are trained"
    assert step(dot, of=Linear()) == 7 and step(dot, of=Linear(), check_separability=False) == 7


class Loss:
    """Mixes records by as much as ``weight`` says; with 0 the term is absent, since a record that
    is NaN would change the others through it.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        if self.weight == 0:
            return by_model(model, batch, key)
        return (1 - self.weight) * by_model(model, batch, key) + self.weight * contrastive(
            model, batch, key
        )


class Late(Loss):
    def __call__(self, model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        return Loss(float(key.step >= 1000))(model, batch, key)


class Mixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean()


WEIGHT = [0.0]


class Settings:
    weight = 0.0


def by_class(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    return Loss(Settings.weight)(model, batch, key)


def by_module(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    return Loss(settings.weight)(model, batch, key)  # type: ignore[name-defined] # noqa: F821


def by_global(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    return Loss(WEIGHT[0])(model, batch, key)


def test_a_term_that_mixes_is_found_when_it_appears() -> None:
    """The check was remembered by the loss's code alone: a term of weight 0 in the first step, or
    another layer, and one record moved the sum by 7.8 or 15 C.
    """

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 1), nn.Identity(), nn.Flatten(0))

    def attack(
        before: Any, after: Any, change: Callable[[nn.Module], object] = lambda _: None
    ) -> None:
        net = model()
        for _ in range(2):
            clipped_sum(before, net, batch_of(4), KEY, max_grad_norm=C)
        change(net)
        with pytest.raises(PrivacyError, match="mixes records"):
            clipped_sum(after, net, batch_of(4), KEY, max_grad_norm=C)

    def of(weight: Any) -> Any:
        return lambda m, b, k: Loss(float(weight))(m, b, k)

    attack(of(0.0), of(1.0))
    weight = torch.zeros(())
    attack(of(weight), of(weight), lambda _: weight.fill_(1.0))
    attack(functools.partial(Loss(0.0)), functools.partial(Loss(1.0)))
    loss = Loss(0.0)
    attack(loss, loss, lambda _: setattr(loss, "weight", 1.0))
    attack(by_global, by_global, lambda _: WEIGHT.__setitem__(0, 1.0))
    attack(by_class, by_class, lambda _: setattr(Settings, "weight", 1.0))
    settings = types.ModuleType("settings_of_a_user")
    vars(settings)["weight"] = 0.0
    inner = types.FunctionType(by_module.__code__, {**globals(), "settings": settings})
    attack(inner, inner, lambda _: setattr(settings, "weight", 1.0))
    numbers = np.zeros(100)
    attack(
        lambda m, b, k: Loss(numbers[99])(m, b, k),
        lambda m, b, k: Loss(numbers[99])(m, b, k),
        lambda _: numbers.fill(1.0),
    )
    many = [0.0] * 300
    attack(
        lambda m, b, k: Loss(many[299])(m, b, k),
        lambda m, b, k: Loss(many[299])(m, b, k),
        lambda _: many.__setitem__(299, 1.0),
    )
    attack(by_model, by_model, lambda net: net.__setitem__(1, Mixed()))
    attack(
        by_model,
        by_model,
        lambda net: net[0].register_forward_hook(lambda layer, given, out: out - out.mean()),
    )
    with pytest.raises(PrivacyError, match="mixes records"):
        clipped_sum(Late(0.0), model(), batch_of(4), KEY, max_grad_norm=C)


def test_whether_the_check_passes_does_not_depend_on_the_records() -> None:
    """It runs on random ones: a hostile record contributes zero, and raises nothing."""
    batch = batch_of(4)
    batch.image_BVCHW[1] = torch.nan
    batch.image_BVCHW[2] = 1e38
    total = clipped_sum(dot, Linear(), batch, KEY, max_grad_norm=C)
    assert total.grads["w"].isfinite().all() and total.num_records == 4
