"""float16: the loss scale comes from public things, is undone before the norm, and moves nothing
that a private record overflows.
"""

import math

import torch
import zoo
from zoo import KEY, make_batch, rows

from dpvision.dp.clip import clipped_sum, public_loss_scale


def flat(total):
    return torch.cat([total.grads[name].double().flatten() for name in sorted(total.grads)])


def test_scale_is_the_largest_power_of_two_less_headroom():
    model, public = zoo.tiny_mae(), make_batch(3, seed=9)
    with torch.autocast("cpu", torch.float16):
        scale = public_loss_scale(zoo.mae_losses, model, public, KEY)
        norms = [
            clipped_sum(
                zoo.mae_losses, model, public, KEY, max_grad_norm=1.0, loss_scale=scale * 2.0**k
            )
            .norms_B.isfinite()
            .all()
            for k in (0, 4, 5)
        ]
    assert math.frexp(scale)[0] == 0.5
    assert norms == [True, True, False] or scale == 2.0**20


def test_scale_does_not_look_at_private_records():
    """The same whatever was clipped before it: no state is kept between calls."""
    model, public = zoo.tiny_mae(), make_batch(3, seed=9)
    with torch.autocast("cpu", torch.float16):
        first = public_loss_scale(zoo.mae_losses, model, public, KEY)
        clipped_sum(
            zoo.mae_losses,
            model,
            make_batch(4)._replace(image_BVCHW=torch.full((4, 1, 3, 8, 8), 3e38)),
            KEY,
            max_grad_norm=1.0,
            loss_scale=first,
        )
        assert public_loss_scale(zoo.mae_losses, model, public, KEY) == first


def test_overflow_of_one_record_leaves_the_others():
    model, batch = zoo.tiny_mae(), make_batch(4)
    image = batch.image_BVCHW.clone()
    image[2] *= 3e4  # finite in float32; its gradient is beyond float16
    with torch.autocast("cpu", torch.float16):
        total = clipped_sum(
            zoo.mae_losses,
            model,
            batch._replace(image_BVCHW=image),
            KEY,
            max_grad_norm=0.1,
            loss_scale=1024.0,
        )
        others = clipped_sum(
            zoo.mae_losses, model, rows(batch, [0, 1, 3]), KEY, max_grad_norm=0.1, loss_scale=1024.0
        )
    assert not total.norms_B[2].isfinite()
    assert (flat(total) - flat(others)).norm() <= 1e-6 * flat(others).norm()


def test_scaled_gradients_are_clipped_at_the_unscaled_norm():
    model, batch = zoo.tiny_mae(), make_batch(4)
    expected = clipped_sum(zoo.mae_losses, model, batch, KEY, max_grad_norm=0.1)
    for scale in (2.0**-6, 2.0**10):
        for method in ("one_pass", "vmap"):
            total = clipped_sum(
                zoo.mae_losses,
                model,
                batch,
                KEY,
                max_grad_norm=0.1,
                loss_scale=scale,
                method=method,
            )
            torch.testing.assert_close(total.norms_B, expected.norms_B)
            assert (flat(total) - flat(expected)).norm() <= 1e-5 * flat(expected).norm()
