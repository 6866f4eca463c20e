"""The clipped sum against a loop of single records in float64, and its contract: one record moves it by at most C."""

import itertools

import pytest
import torch
import zoo
from per_record_loop import clipped_sum_loop, per_record_gradients
from torch import nn
from zoo import KEY, GradientIsPicture, class_losses, make_batch, picture_losses, rows

from dpvision.dp.clip import ClippedSum, clipped_sum
from dpvision.errors import ConfigError, PrivacyError


@pytest.fixture(params=zoo.ZOO)
def case(request):
    """(model in float32, loss function) of one member of the zoo."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        build, loss_fn = zoo.ZOO[request.param]
        return build(), loss_fn


def flat(total: ClippedSum) -> torch.Tensor:
    return torch.cat([total.grads[name].double().flatten() for name in sorted(total.grads)])


def middle_norm(loss_fn, model, batch) -> float:
    """A clip norm that some records exceed and others do not."""
    norms = [
        torch.cat([g.flatten() for g in grads.values()]).norm().item() for _, grads in per_record_gradients(loss_fn, model, batch, KEY)
    ]
    return sorted(norms)[len(norms) // 2] * 0.999


@pytest.mark.parametrize("num", [0, 1, 6])
def test_equals_the_loop_in_float64(case, num):
    model, loss_fn = case[0].double(), case[1]
    batch = make_batch(num, dtype=torch.float64)
    clip = middle_norm(loss_fn, model, batch) if num else 1.0
    total = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=clip)
    expected, norms, losses = clipped_sum_loop(loss_fn, model, batch, KEY, clip)
    assert total.grads.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(total.grads[name], value, rtol=0, atol=1e-12 * clip)
    assert total.num_records == num
    torch.testing.assert_close(total.norms_B.double(), torch.tensor(norms, dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(total.losses_B.double(), torch.tensor(losses, dtype=torch.float64), rtol=1e-6, atol=0)
    assert num < 2 or 0 < sum(norm > clip for norm in norms) < num


def test_equals_the_loop_in_float32(case):
    model, loss_fn = case
    batch = make_batch(6)
    clip = middle_norm(loss_fn, model, batch)
    total = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=clip)
    expected, _, _ = clipped_sum_loop(loss_fn, model, batch, KEY, clip)
    reference = torch.cat([expected[name].flatten() for name in sorted(expected)])
    assert (flat(total) - reference).norm() <= 1e-5 * reference.norm()
    assert all(value.dtype == torch.float32 for value in total.grads.values())


@pytest.mark.parametrize("sizes", [(6,), (2, 4), (1, 2, 3), (0, 6)])
def test_accumulation_changes_nothing(case, sizes):
    model, loss_fn = case[0].double(), case[1]
    batch = make_batch(6, dtype=torch.float64)
    whole = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=0.5)
    total = ClippedSum.zeros(model)
    for part in torch.arange(6).split(sizes):
        total = total + clipped_sum(loss_fn, model, rows(batch, part), KEY, max_grad_norm=0.5)
    torch.testing.assert_close(flat(total), flat(whole), rtol=0, atol=1e-14)
    assert total.num_records == 6
    torch.testing.assert_close(total.norms_B, whole.norms_B)
    torch.testing.assert_close(total.losses_B, whole.losses_B)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 64])
def test_chunk_size_changes_nothing(case, chunk_size):
    model, loss_fn = case[0].double(), case[1]
    batch = make_batch(6, dtype=torch.float64)
    whole = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=0.5)
    chunked = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=0.5, chunk_size=chunk_size)
    torch.testing.assert_close(flat(chunked), flat(whole), rtol=0, atol=1e-14)


def test_sum_does_not_depend_on_rows(case):
    """Masks are keyed by the record's id: in another order every record keeps its loss and its norm."""
    model, loss_fn = case[0].double(), case[1]
    batch = make_batch(6, dtype=torch.float64)
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    straight = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=0.5)
    shuffled = clipped_sum(loss_fn, model, rows(batch, order), KEY, max_grad_norm=0.5)
    torch.testing.assert_close(shuffled.losses_B, straight.losses_B[order])
    torch.testing.assert_close(shuffled.norms_B, straight.norms_B[order])
    torch.testing.assert_close(flat(shuffled), flat(straight), rtol=0, atol=1e-13)


def test_removing_replacing_or_scaling_a_record_moves_the_sum_by_at_most_c(case):
    model, loss_fn, clip = case[0].double(), case[1], 0.3
    batch = make_batch(5, dtype=torch.float64)
    total = flat(clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=clip))
    for j in range(5):
        without = flat(clipped_sum(loss_fn, model, rows(batch, [i for i in range(5) if i != j]), KEY, max_grad_norm=clip))
        assert (total - without).norm() <= clip * (1 + 1e-12)
        for scale in (1e-6, 30.0, 1e4, 1e8):
            image = batch.image_BVCHW.clone()
            image[j] *= scale
            other = flat(clipped_sum(loss_fn, model, batch._replace(image_BVCHW=image), KEY, max_grad_norm=clip))
            assert (other - without).norm() <= clip * (1 + 1e-12)
            assert (other - total).norm() <= 2 * clip * (1 + 1e-12)


@pytest.mark.parametrize("shape", [(1, 1, 7), (3, 8, 8), (3, 33, 41), (3, 224, 224)])
@pytest.mark.parametrize("clip", [1e-12, 0.1, 1.0, 1e12])
def test_float32_contribution_never_exceeds_c(shape, clip):
    """Any gradient whatever, in float32, measured in float64: no slack."""
    generator = torch.Generator().manual_seed(3)
    model = GradientIsPicture(*shape)
    batch = make_batch(1)
    for scale, shape_of_values in itertools.product((1e-20, 1.0, 1.0000001, 1e3, 1e9, 1e17), ("normal", "equal", "one", "heavy")):
        noise = torch.randn(1, 1, *shape, generator=generator)
        image = {"normal": noise, "equal": torch.ones_like(noise), "one": torch.zeros_like(noise), "heavy": noise.square() * noise.exp()}[
            shape_of_values
        ]
        image[..., 0, 0] = 1.0
        image = (image / image.norm() * clip * scale).clamp(-1e18, 1e18)
        total = clipped_sum(picture_losses, model, batch._replace(image_BVCHW=image), KEY, max_grad_norm=clip)
        norm = total.grads["weight"].double().norm().item()
        assert norm <= clip
        true = image.double().norm().item()
        assert norm >= min(true, clip) * (1 - 1e-5), "clipped more than it had to be"


def test_huge_batch_of_equal_records_keeps_each_contribution():
    """Summation does not hide an overshoot: the sum of n equal clipped records has norm at most n C."""
    model, num = GradientIsPicture(3, 8, 8), 200
    image = make_batch(1, seed=5).image_BVCHW.expand(num, -1, -1, -1, -1) * 1e6
    total = clipped_sum(picture_losses, model, make_batch(num)._replace(image_BVCHW=image), KEY, max_grad_norm=0.1)
    assert total.grads["weight"].double().norm() <= num * 0.1
    assert total.grads["weight"].double().norm() >= num * 0.1 * (1 - 1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_record_that_is_not_finite_contributes_exactly_zero(poison):
    model = GradientIsPicture(3, 8, 8)
    batch = make_batch(4)
    image = batch.image_BVCHW.clone()
    image[2, 0, 1, 3, 3] = poison
    total = clipped_sum(picture_losses, model, batch._replace(image_BVCHW=image), KEY, max_grad_norm=0.1)
    expected = clipped_sum(picture_losses, model, rows(batch, [0, 1, 3]), KEY, max_grad_norm=0.1)
    torch.testing.assert_close(total.grads, expected.grads, rtol=1e-6, atol=1e-9)
    assert total.num_records == 4 and not total.norms_B[2].isfinite() and total.norms_B[[0, 1, 3]].isfinite().all()


def test_only_records_that_are_not_finite_give_zeros():
    total = clipped_sum(
        picture_losses,
        GradientIsPicture(3, 8, 8),
        make_batch(2)._replace(image_BVCHW=torch.full((2, 1, 3, 8, 8), torch.nan)),
        KEY,
        max_grad_norm=1.0,
    )
    assert torch.equal(total.grads["weight"], torch.zeros(3, 8, 8))


@pytest.mark.parametrize("max_grad_norm", [0.4, None])
def test_padding_is_not_in_the_sum_whatever_it_holds(case, max_grad_norm):
    model, loss_fn = case
    batch = make_batch(5)
    image = batch.image_BVCHW.clone()
    image[1], image[4] = torch.nan, 1e20
    valid = torch.tensor([True, False, True, True, False])
    total = clipped_sum(loss_fn, model, batch._replace(image_BVCHW=image, valid_B=valid), KEY, max_grad_norm=max_grad_norm)
    expected = clipped_sum(loss_fn, model, rows(batch, valid), KEY, max_grad_norm=max_grad_norm)
    assert torch.equal(flat(total), flat(expected))
    assert total.num_records == 3 and len(total.losses_B) == 3 and torch.equal(total.norms_B, expected.norms_B)


def test_all_padding_is_zero(case):
    model, loss_fn = case
    batch = make_batch(2)._replace(valid_B=torch.zeros(2, dtype=torch.bool))
    total = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=1.0)
    assert total.num_records == 0 and not flat(total).any() and len(total.norms_B) == 0


def test_views_are_averaged_before_the_clip():
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = zoo.Bare().double()
    batch = make_batch(4, views=2, dtype=torch.float64)
    clip = 0.1
    total = clipped_sum(class_losses, model, batch, KEY, max_grad_norm=clip)
    expected, _, _ = clipped_sum_loop(class_losses, model, batch, KEY, clip)
    torch.testing.assert_close(total.grads, expected, rtol=0, atol=1e-13)
    separately = sum(
        flat(clipped_sum(class_losses, model, batch._replace(image_BVCHW=batch.image_BVCHW[:, v : v + 1]), KEY, max_grad_norm=clip)) / 2
        for v in range(2)
    )
    assert (flat(total) - separately).norm() > 1e-2 * clip, "the test would not see views clipped one by one"


def test_tied_parameter_stands_once_and_frozen_ones_not_at_all():
    with torch.random.fork_rng():
        torch.manual_seed(2)
        tied, frozen = zoo.Tied(), zoo.Frozen()
    batch = make_batch(3)
    assert set(clipped_sum(class_losses, tied, batch, KEY, max_grad_norm=1.0).grads) == {"down.weight", "up.bias"}
    names = {"body.0.weight", "body.2.bias", "unused"}
    assert set(clipped_sum(class_losses, frozen, batch, KEY, max_grad_norm=1.0).grads) == names
    frozen.body[0].bias.requires_grad_(True)
    thawed = clipped_sum(class_losses, frozen, batch, KEY, max_grad_norm=1e-3)
    assert set(thawed.grads) == names | {"body.0.bias"} and flat(thawed).norm() <= 3e-3


def test_without_clip_it_is_the_plain_sum(case):
    model, loss_fn = case[0].double(), case[1]
    batch = make_batch(5, dtype=torch.float64)
    total = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=None)
    expected, _, losses = clipped_sum_loop(loss_fn, model, batch, KEY, float("inf"))
    torch.testing.assert_close(total.grads, expected, rtol=0, atol=1e-12)
    assert total.num_records == 5 and len(total.norms_B) == 0
    torch.testing.assert_close(total.losses_B.double(), torch.tensor(losses, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("max_grad_norm", [0.4, None])
def test_model_is_left_as_it_was(case, max_grad_norm):
    model, loss_fn = case
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    random_state = torch.get_rng_state()
    clipped_sum(loss_fn, model, make_batch(3), KEY, max_grad_norm=max_grad_norm)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_running_statistics_take_nothing_from_the_data():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 5))
    clipped_sum(class_losses, model, make_batch(4), KEY, max_grad_norm=None)
    assert not model[1].running_mean.any() and model[1].num_batches_tracked == 0


def test_autocast_is_the_callers_and_stays_out_of_the_norm():
    model = zoo.tiny_mae()
    batch, clip = make_batch(6), 0.05
    with torch.autocast("cpu", torch.bfloat16):
        total = clipped_sum(zoo.mae_losses, model, batch, KEY, max_grad_norm=clip)
        singles = [clipped_sum(zoo.mae_losses, model, rows(batch, [i]), KEY, max_grad_norm=clip) for i in range(6)]
    exact = clipped_sum(zoo.mae_losses, model, batch, KEY, max_grad_norm=clip)
    assert all(value.dtype == torch.float32 for value in total.grads.values()) and total.losses_B.dtype == torch.float32
    assert not torch.equal(total.losses_B, exact.losses_B), "autocast had no effect"
    torch.testing.assert_close(total.losses_B, exact.losses_B, rtol=2e-2, atol=0)
    assert all(flat(single).norm() <= clip for single in singles)
    torch.testing.assert_close(flat(total), sum(map(flat, singles)), rtol=0, atol=1e-6 * clip)


@pytest.mark.parametrize(
    "setting",
    [
        {"rule": "automatic"},
        {"method": "one_pass"},
        {"max_grad_norm": float("nan")},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": -1.0},
        {"max_grad_norm": float("inf")},
        {"max_grad_norm": 1e-20},
        {"chunk_size": 0},
    ],
)
def test_unknown_settings_are_refused(setting):
    name = next(iter(setting))
    with pytest.raises(ConfigError, match=f"clip: {name}=.*; expected"):
        clipped_sum(picture_losses, GradientIsPicture(3, 8, 8), make_batch(2), KEY, **{"max_grad_norm": 1.0, **setting})


def test_model_without_trained_parameters_is_refused():
    model = GradientIsPicture(3, 8, 8).requires_grad_(False)
    with pytest.raises(ConfigError, match="Unfreeze"):
        clipped_sum(picture_losses, model, make_batch(2), KEY, max_grad_norm=1.0)


def test_reduced_precision_products_are_refused():
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(PrivacyError, match="highest"):
            clipped_sum(picture_losses, GradientIsPicture(3, 8, 8), make_batch(2), KEY, max_grad_norm=1.0)
    finally:
        torch.set_float32_matmul_precision("highest")
