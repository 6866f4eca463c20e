"""What rounding may do to a norm and to a contribution: half precision, loss scales, cancellation.

Contributions are measured in float64, of one record at a time. ``EPS`` is the unit roundoff of the
precision named.
"""

from functools import partial

import pytest
import torch
import zoo
import zoo_layers
import zoo_tokens
from per_record_loop import flat, per_record_gradients
from torch import nn
from zoo import KEY, TokenSums, make_batch, rows, token_batch, token_sum_losses

from dpvision.dp import one_pass
from dpvision.dp.clip import METHODS, clipped_sum
from dpvision.dp.rounding import LOOSE, RESERVE

EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
MOST = (1 - RESERVE) * (1 + LOOSE)
"""Proven bound on a contribution, in units of C."""
HALF = {
    name: {**zoo.ZOO, **zoo_layers.LAYERS, **zoo_tokens.TOKENS}[name]
    for name in (
        "bare",
        "tied",
        "reused",
        "right_product",
        "two_biases",
        "mae",
        "convnet",
        "linears",
        "conv_gram",
        "conv_patches",
        "conv_grouped",
        "norms",
        "standardised",
        "captioner_tied",
        "captioner_chunked_tied",
        "positions",
        "layer_scale",
        "attention_batch_first",
    )
}


@pytest.fixture(params=HALF)
def case(request):
    with torch.random.fork_rng():
        torch.manual_seed(11)
        build, loss_fn = HALF[request.param]
        return build(), loss_fn


@pytest.fixture(params=METHODS)
def clip_by(request):
    return partial(clipped_sum, method=request.param)


def autocast(dtype):
    """Half precision, and the loss scale that float16 needs."""
    return torch.autocast("cpu", dtype), 2.0**10 if dtype == torch.float16 else 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_no_contribution_exceeds_c(case, clip_by, dtype):
    """Whatever was rounded on the way to a gradient, what is added is no longer than C, up to the
    order of the float32 sum.
    """
    model, loss_fn = case
    context, loss_scale = autocast(dtype)
    for clip in (1e-3, 0.5):
        for i in range(4):
            with context:
                one = clip_by(
                    loss_fn,
                    model,
                    rows(make_batch(4), [i]),
                    KEY,
                    max_grad_norm=clip,
                    loss_scale=loss_scale,
                )
            assert flat(one.grads).norm() <= clip * (1 - RESERVE) * (1 + 1e-6)
            assert (
                all(value.dtype == torch.float32 for value in one.grads.values())
                and one.losses_B.dtype == torch.float32
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_norms_are_those_of_what_is_added(case, clip_by, dtype):
    """The norm in use, C / factor, against the gradient itself: the same record with a clip norm
    that does not cut it.
    """
    model, loss_fn = case
    context, loss_scale = autocast(dtype)
    with context:
        for i in range(3):
            one = rows(make_batch(3), [i])
            whole = clip_by(loss_fn, model, one, KEY, max_grad_norm=1e6, loss_scale=loss_scale)
            true = flat(whole.grads).norm().item()
            assert abs(whole.norms_B.item() / true - 1) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_both_methods_are_near_float32(case, dtype):
    """Every number of a gradient passes through some 2 x depth roundings of relative size EPS, in
    products whose terms mostly do not cancel: 32 EPS of the norm are allowed for either method, and
    64 EPS between them. Were the methods' roundings the same, the second bound would be zero: they
    are not, since a bias or a scale is summed in float32 by one pass, and in half precision by
    vmap.
    """
    model, loss_fn = case
    context, loss_scale = autocast(dtype)
    batch = make_batch(4)
    exact = [flat(grads) for _, grads in per_record_gradients(loss_fn, model, batch, KEY)]
    for i, expected in enumerate(exact):
        found = []
        for method in METHODS:
            with context:
                one = clipped_sum(
                    loss_fn,
                    model,
                    rows(batch, [i]),
                    KEY,
                    max_grad_norm=1e6,
                    method=method,
                    loss_scale=loss_scale,
                )
            found.append(flat(one.grads))
            assert (found[-1] - expected).norm() <= 32 * EPS[dtype] * expected.norm()
            assert one.norms_B.item() >= (1 - 32 * EPS[dtype]) * expected.norm()
        assert not torch.equal(found[0], exact[i]), "autocast had no effect"
        assert (found[0] - found[1]).norm() <= 64 * EPS[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_sum_is_that_of_single_records(case, dtype):
    model, loss_fn = case
    context, loss_scale = autocast(dtype)
    batch, clip = make_batch(5), 0.05
    with context:
        whole = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=clip, loss_scale=loss_scale)
        singles = [
            clipped_sum(
                loss_fn, model, rows(batch, [i]), KEY, max_grad_norm=clip, loss_scale=loss_scale
            )
            for i in range(5)
        ]
    total = sum(flat(single.grads) for single in singles)
    assert (flat(whole.grads) - total).norm() <= 2 * EPS[
        dtype
    ] * clip  # kernels for one row may round another way
    torch.testing.assert_close(
        whole.losses_B,
        torch.cat([single.losses_B for single in singles]),
        rtol=4 * EPS[dtype],
        atol=1e-4,
    )


def test_a_half_precision_gradient_that_overflows_takes_out_its_record_only():
    """float16 with a loss scale that is too large for one record: that record contributes zero, the
    others what they did.
    """
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 40), nn.Tanh(), nn.Linear(40, 5))
    batch = make_batch(4)

    def losses(model, batch, key):
        weight_B = torch.where(batch.label_B == 3, 1e4, 1.0)
        return zoo.class_losses(model, batch, key) * weight_B

    for method in METHODS:
        with torch.autocast("cpu", torch.float16):
            total = clipped_sum(
                losses, model, batch, KEY, max_grad_norm=0.1, method=method, loss_scale=2.0**10
            )
            good = batch.label_B != 3
            others = clipped_sum(
                losses,
                model,
                rows(batch, good),
                KEY,
                max_grad_norm=0.1,
                method=method,
                loss_scale=2.0**10,
            )
        assert 0 < good.sum() < 4 and torch.equal(total.norms_B.isfinite(), good)
        assert (
            others.norms_B.isfinite().all()
            and (flat(total.grads) - flat(others.grads)).norm() <= 1e-3 * 0.1
        )


def cancelling(common: float, places: int, p: int, q: int, seed: int):
    """A record whose tokens share a part of size ``common``, and whose output gradients sum to
    nearly zero, with a gradient of norm 40 C or more: that part cancels in the gradient, though not
    in its Gram matrices.
    """
    generator = torch.Generator().manual_seed(seed)
    shared, own = (
        torch.randn(1, n, q, generator=generator, dtype=torch.float64) / q**0.5 for n in (1, places)
    )
    w = torch.randn(1, places, p, generator=generator, dtype=torch.float64) * 10 / p**0.5
    return token_batch((common * shared + own).float(), (w - w.mean(1, keepdim=True)).float())


@pytest.mark.parametrize("common", [1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6])
@pytest.mark.parametrize("shape", [(16, 100, 120), (64, 300, 300)])
def test_cancellation_does_not_carry_a_record_past_the_clip_norm(clip_by, shape, common):
    """The proven bound, measured in float64, however much of the Gram matrices cancels."""
    for seed in range(3):
        batch = cancelling(common, *shape, seed)
        total = clip_by(token_sum_losses, TokenSums(*shape[1:]), batch, KEY, max_grad_norm=1.0)
        assert total.grads["map.weight"].double().norm() <= MOST


def test_cancelling_records_beside_others_and_one_that_is_not_finite():
    """Those whose norm is taken another way stand in the same batch; against vmap, which writes all
    gradients out.
    """
    sizes = (1.0, 1e5, 1e2, 1e3, 1e6)
    parts = [cancelling(common, 16, 100, 120, seed) for seed, common in enumerate(sizes)]
    model, batch = (
        TokenSums(100, 120),
        make_batch(5)._replace(image_BVCHW=torch.cat([part.image_BVCHW for part in parts])),
    )
    for poisoned in (False, True):
        if poisoned:
            batch.image_BVCHW[1] = torch.nan
        one_pass, vmap = (
            clipped_sum(token_sum_losses, model, batch, KEY, max_grad_norm=1.0, method=method)
            for method in METHODS
        )
        torch.testing.assert_close(
            one_pass.norms_B, vmap.norms_B, rtol=1e-5, atol=0, equal_nan=True
        )
        assert one_pass.norms_B.isfinite().sum() == 5 - poisoned
        assert (flat(one_pass.grads) - flat(vmap.grads)).norm() <= 1e-5


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_two_uses_that_cancel_are_one_gradient(clip_by, sign):
    """The same tokens through a weight twice with opposite output gradients: the gradient is the
    small rest, or twice the whole.
    """

    def losses(model, batch, key):
        x_BTQ, w_BTP = batch.image_BVCHW[:, 0, 0].split((120, 100), 2)
        return (model.map(x_BTQ) * w_BTP).sum((1, 2)) - sign * (
            model.map(x_BTQ * (1 + 1e-3)) * w_BTP
        ).sum((1, 2))

    generator = torch.Generator().manual_seed(5)
    x, w = (
        torch.randn(3, 16, 120, generator=generator),
        torch.randn(3, 16, 100, generator=generator),
    )
    model, batch = TokenSums(100, 120), token_batch(x, w)
    norms = [flat(grads).norm() for _, grads in per_record_gradients(losses, model, batch, KEY)]
    total = clip_by(losses, model, batch, KEY, max_grad_norm=0.1)
    torch.testing.assert_close(
        total.norms_B.double(), torch.stack(norms), rtol=1e-3 if sign > 0 else 1e-5, atol=0
    )
    for i in range(3):
        one = clip_by(losses, model, rows(batch, [i]), KEY, max_grad_norm=0.1)
        assert flat(one.grads).norm() <= 0.1 * MOST


def test_half_precision_that_the_model_switches_on_itself_counts_in_the_norm(monkeypatch):
    """As in models that Accelerate prepared: autocast around the forward method. A GPU rounds the
    operands of weight gradients then; the bound on it is added to every norm (here as on a GPU).
    """
    monkeypatch.setattr(
        one_pass, "rounding", lambda dtype, _: torch.finfo(dtype).eps / 2 * (dtype.itemsize == 2)
    )
    build, losses = zoo_layers.LAYERS["linears"]
    model, how = build(), one_pass.How(lambda norms, finite: norms, 1.0)

    def inside(model, batch, key):
        with torch.autocast("cpu", torch.bfloat16):
            return losses(model, batch, key).float()

    for loss, expected in ((inside, 2.0**-8), (losses, 0.0)):
        passed = one_pass.forward_backward(loss, model, make_batch(4), KEY, how)
        assert passed.rounding == expected
