"""Published architectures, as others wrote them, against the loop of single records, and the
contract on them.
"""

import pytest
import torch
from per_record_loop import clipped_sum_loop, flat, middle_norm
from zoo import KEY, class_losses, make_batch, rows
from zoo_published import PUBLISHED, SIZE

from dpvision.dp.clip import clipped_sum
from dpvision.dp.route import make_route


@pytest.fixture(params=PUBLISHED)
def model(request):
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return PUBLISHED[request.param]()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_the_loop(model, dtype, tolerance):
    model = model.to(dtype)
    for num in (1, 3):
        batch = make_batch(num, size=SIZE, dtype=dtype)
        clip = middle_norm(class_losses, model, batch, KEY)
        total = clipped_sum(class_losses, model, batch, KEY, max_grad_norm=clip)
        expected, norms, _ = clipped_sum_loop(class_losses, model, batch, KEY, clip)
        assert all(value.any() for value in expected.values()), (
            "a parameter without a gradient is not tested"
        )
        assert (flat(total.grads) - flat(expected)).norm() <= tolerance * flat(expected).norm()
        torch.testing.assert_close(
            total.norms_B.double(), torch.tensor(norms, dtype=torch.float64), rtol=1e-5, atol=0
        )


def test_no_parameter_is_slow(model):
    assert make_route(class_losses, model, make_batch(2, size=SIZE), KEY).slow == {}


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_a_record_moves_the_sum_by_at_most_c(model, dtype, slack):
    model, clip = model.to(dtype), 0.3
    batch = make_batch(3, size=SIZE, dtype=dtype)
    others = flat(
        clipped_sum(class_losses, model, rows(batch, [0, 2]), KEY, max_grad_norm=clip).grads
    )
    for scale in (1e-6, 1.0, 1e4, 1e8):
        image = batch.image_BVCHW.clone()
        image[1] *= scale
        total = clipped_sum(
            class_losses, model, batch._replace(image_BVCHW=image), KEY, max_grad_norm=clip
        )
        assert (flat(total.grads) - others).norm() <= clip * (1 + slack)
