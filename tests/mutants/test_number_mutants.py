"""Mistakes with numbers that leave a clipped sum: planted, and caught. The ids are those of
docs/pitfalls.md, section "Numbers".
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import zoo
from made import changed
from per_record_loop import flat
from torch import nn
from zoo import (
    KEY,
    GradientIsImage,
    TokenSums,
    class_losses,
    image_losses,
    make_batch,
    rows,
    token_batch,
    token_sum_losses,
)

from dpvision.data.batch import Batch
from dpvision.dp import clip, gram, one_pass, weight_grads
from dpvision.dp.clip import ClippedSum, clipped_sum
from dpvision.dp.rounding import LOOSE, RESERVE
from dpvision.errors import PrivacyError

from .planting import MORE, OTHER, C, ClippedSumFn, caught, check_clip, planted, seeded


def with_bad_record(bad: float) -> Batch:
    """Four records, the third of which has one number ``bad``."""
    batch = make_batch(4)
    batch.image_BVCHW[2, 0, 1, 3, 3] = bad
    return batch


def check_bad_record(clipped_sum: ClippedSumFn, bad: float) -> None:
    """By a gradient that is written out, and by one that is kept as outer products."""
    for model, loss_fn in (
        (GradientIsImage(3, 8, 8), image_losses),
        (seeded(one_linear), class_losses),
    ):
        name = next(iter(dict(model.named_parameters())))
        good = rows(make_batch(4), [0, 1, 3])
        before = clipped_sum(loss_fn, model, good, KEY, max_grad_norm=C).grads[name]
        mixed = clipped_sum(loss_fn, model, with_bad_record(bad), KEY, max_grad_norm=C).grads[name]
        assert mixed.isfinite().all(), "one record spoils the whole sum"
        assert mixed.any(), "one record takes the others out of the step"
        torch.testing.assert_close(
            mixed, before, rtol=1e-5, atol=1e-7, msg="a bad record does not contribute exactly zero"
        )
        after = clipped_sum(loss_fn, model, good, KEY, max_grad_norm=C).grads[name]
        assert torch.equal(after, before), "one record changes later sums"


def one_linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 5))


def test_nonfinite_record_poisons(method: str) -> None:
    def check() -> None:
        for bad in (torch.nan, torch.inf, 1e30):
            check_bad_record(partial(clipped_sum, method=method), bad)

    check()
    with pytest.MonkeyPatch.context() as patch:  # a factor of zero only
        patch.setattr(torch.Tensor, "masked_fill_", lambda self, mask, value: self)
        patch.setattr(
            clip,
            "summed",
            lambda grad_BW, factor_B, finite_B: weight_grads.summed(
                grad_BW, factor_B, finite_B | True
            ),
        )
        with planted(
            torch.Tensor, "masked_fill", lambda self, mask, value: self, "spoils the whole sum"
        ):
            check()


def test_loss_scale_in_norm(method: str) -> None:
    def check(loss_scale: float = 1024.0) -> None:
        check_clip(
            partial(clipped_sum, method=method, loss_scale=loss_scale),
            seeded(zoo.Bare),
            class_losses,
            make_batch(4),
        )

    def left_in(norms_B, finite_B, **settings):
        return factors(norms_B * 1024, finite_B, **settings)

    def undone_in_the_sum_only(loss_fn, model, batch, key, *, max_grad_norm):
        total = clipped_sum(
            lambda *args: 1024 * loss_fn(*args),
            model,
            batch,
            key,
            max_grad_norm=max_grad_norm,
            method=method,
        )
        return replace(total, grads={name: value / 1024 for name, value in total.grads.items()})

    def left_in_the_sum(norms_B, finite_B, **settings):
        return factors(norms_B, finite_B, **settings) * 1024

    factors = clip._factors
    check()
    with planted(clip, "_factors", left_in, OTHER):
        check()
    with planted(clip, "_factors", left_in_the_sum, MORE):
        check()
    with caught(OTHER):
        check_clip(undone_in_the_sum_only, seeded(zoo.Bare), class_losses, make_batch(4))


def test_loss_scale_private_overflow() -> None:
    """Against a scaler as in mixed-precision training: a step with an overflow is left out, and the
    scale is halved for later ones.
    """

    def skipping(loss_fn, model, batch, key, *, max_grad_norm):
        total = clipped_sum(loss_fn, model, batch, key, max_grad_norm=max_grad_norm)
        return total if total.norms_B.isfinite().all() else ClippedSum.zeros(model, max_grad_norm)

    class Halving:
        scale = 1.0

        def __call__(self, loss_fn, model, batch, key, *, max_grad_norm):
            total = clipped_sum(
                lambda *args: self.scale * loss_fn(*args),
                model,
                batch,
                key,
                max_grad_norm=max_grad_norm * self.scale,
            )
            grads = {name: value / self.scale for name, value in total.grads.items()}
            if not total.norms_B.isfinite().all():
                self.scale *= (
                    0.3  # a power of two would hide it: such a scale only moves the exponent
                )
            return changed(total, grads=grads)

    check_bad_record(clipped_sum, torch.nan)
    with caught("takes the others out of the step"):
        check_bad_record(skipping, torch.nan)
    with caught("changes later sums"):
        check_bad_record(Halving(), torch.nan)


def test_half_precision_norm(method: str) -> None:
    """Gradients just above the clip norm, or far above, written out and as outer products; measured
    in float64, without slack.
    """

    def check_written() -> None:
        generator = torch.Generator().manual_seed(3)
        for shape in ((1, 1, 7), (3, 33, 41), (3, 128, 128)):
            model = GradientIsImage(*shape)
            for scale in (1.001, 3.0, 1e3, 1e7):
                image = torch.randn(1, 1, *shape, generator=generator)
                image *= C * scale / image.norm()
                measure(model, image_losses, make_batch(1)._replace(image_BVCHW=image))

    def check_outer() -> None:
        generator = torch.Generator().manual_seed(3)
        for places, p, q in ((3, 64, 65), (16, 100, 120)):
            for scale in (1.001, 3.0, 1e3):
                x, w = (
                    torch.rand(1, places, q, generator=generator),
                    torch.rand(1, places, p, generator=generator),
                )
                w *= C * scale / (w.mT @ x).norm()
                measure(TokenSums(p, q), token_sum_losses, token_batch(x, w))

    def measure(model: nn.Module, loss_fn: Any, batch: Batch) -> None:
        total = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=C, method=method)
        norm = flat(total.grads).norm()
        assert norm <= C * (1 - RESERVE) * (1 + LOOSE), (
            "a contribution is longer than the clip norm"
        )
        assert norm >= C * (1 - RESERVE) * (1 - 1e-5), (
            "a contribution is cut shorter than the clip norm"
        )

    def norms_in(dtype):
        return lambda grads: (
            sum(value.to(dtype).square().flatten(1).sum(1) for value in grads.values())
            .sqrt()
            .double()
        )

    def squares_in(dtype):
        return lambda value: value.to(dtype).square().flatten(1).sum(1).double()

    def product_in(dtype):
        return lambda a, b: torch.bmm(a.to(dtype), b.to(dtype)).float()

    check_written()
    check_outer()
    for dtype in (torch.bfloat16, torch.float16):
        if method == "vmap":
            with planted(clip, "written_norms", norms_in(dtype), "a contribution is"):
                check_written()
        else:
            with planted(weight_grads, "sum_of_squares", squares_in(dtype), "a contribution is"):
                check_written()
            with planted(gram, "product", product_in(dtype), "a contribution is"):
                check_outer()


class TurningLoss(nn.Module):
    """sin(10^8 y) of a product whose last bits depend on the number of rows, as those of float32
    products on some processors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (1e8 * self.linear(x.flatten(1)) * (1 + 2.0**-23 * (len(x) < 16))).sin()[:, 0]


def turning_losses(model: nn.Module, batch: Batch, _key: Any) -> torch.Tensor:
    return model(batch.image_BVCHW)


def test_bits_follow_company() -> None:
    """Fifteen equal records, and one more."""

    def check() -> None:
        model = seeded(TurningLoss)
        for i in range(8):
            batch = rows(make_batch(8), [i] * 16)._replace(record_id_B=torch.arange(16))
            whole, part = (
                flat(
                    clipped_sum(
                        turning_losses,
                        model,
                        rows(batch, [*range(n)]),
                        KEY,
                        max_grad_norm=C,
                        rows=16,
                    ).grads
                )
                for n in (16, 15)
            )
            assert (whole.double() - part.double()).norm() <= C, (
                "one record moves the sum by more than the clip norm"
            )

    check()
    with planted(
        clip, "next_size", lambda sizes, num_records: num_records, "one record moves the sum"
    ):
        check()


def test_half_precision_weights() -> None:
    """256 records of one direction, three of them shorter: a bfloat16 sum near the middle of two
    numbers.
    """

    def check() -> None:
        model, worst = GradientIsImage(1, 1, 15).bfloat16(), 0.0
        for seed in range(20):
            batch = make_batch(256)._replace(image_BVCHW=torch.full((256, 1, 1, 1, 15), 8.0))
            batch.image_BVCHW[1:4] = 0.3 * torch.rand(
                3, 1, 1, 1, 1, generator=torch.Generator().manual_seed(seed)
            )
            try:
                sums = [
                    flat(clipped_sum(image_losses, model, b, KEY, max_grad_norm=C).grads)
                    for b in (batch, rows(batch, [*range(1, 256)]))
                ]
            except PrivacyError:
                return
            worst = max(worst, float((sums[0].double() - sums[1].double()).norm()))
        assert worst <= C, "one record moves the sum by more than the clip norm"

    check()
    with planted(clip, "_require_wide", lambda params: None, "one record moves the sum"):
        check()


def test_cancelling_outer_products() -> None:
    """Tokens with a large common part, whose output gradients sum to zero: the Gram matrices in
    float32 hold nothing but rounding.
    """

    def check() -> None:
        generator = torch.Generator().manual_seed(3)
        for common in (1.0, 1e3, 1e5):
            x = torch.randn(1, 16, 120, generator=generator) + common * torch.randn(
                1, 1, 120, generator=generator
            )
            w = torch.randn(1, 16, 100, generator=generator, dtype=torch.float64)
            batch = token_batch(x, (w - w.mean(1, keepdim=True)).float())
            total = clipped_sum(token_sum_losses, TokenSums(100, 120), batch, KEY, max_grad_norm=C)
            assert flat(total.grads).norm() <= C * (1 - RESERVE) * (1 + LOOSE), (
                "a contribution is longer than the clip norm"
            )

    check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            one_pass, "block_error", lambda num_records, terms: 0.0
        )  # or they are written out because their tokens are so long
        with planted(one_pass, "LOOSE", float("inf"), "a contribution is longer"):
            check()
