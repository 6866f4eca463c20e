"""The clipped sum against a loop of single records in float64, and its contract: one record moves
it by at most C; by both methods.
"""

import itertools
from functools import partial

import pytest
import torch
import zoo
import zoo_layers
import zoo_tokens
from per_record_loop import clipped_sum_loop, flat, middle_norm, per_record_gradients
from torch import nn
from zoo import KEY, GradientIsImage, class_losses, image_losses, make_batch, rows

from dpvision.data.batch import Batch, HostRows
from dpvision.dp.clip import METHODS, ClippedSum, clipped_sum
from dpvision.dp.rounding import RESERVE, reserve
from dpvision.errors import ConfigError, PrivacyError

MEMBERS = {**zoo.ZOO, **zoo_layers.LAYERS, **zoo_tokens.TOKENS}


QUICK = (
    "bare",
    "tied",
    "reused",
    "without_rule",
    "rule_and_unknown",
    "hidden_use",
    "convnet",
    "mae",
)
"""The members on which the quick tests check what is not the contract itself."""


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(11)
        make, loss_fn = MEMBERS[name]
        return make(), loss_fn


@pytest.fixture(params=MEMBERS)
def every_case(request):
    """(model in float32, loss function) of one member of the zoo."""
    return build(request.param)


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MEMBERS
    ]
)
def case(request):
    """The same; most members in the slow tests only."""
    return build(request.param)


@pytest.fixture(params=METHODS)
def clip_by_any(request):
    """``clipped_sum`` by one of its methods."""
    return partial(clipped_sum, method=request.param)


@pytest.fixture(
    params=[
        pytest.param(method, marks=[pytest.mark.slow] if method == "vmap" else [])
        for method in METHODS
    ]
)
def clip_by(request):
    """The same; by vmap, the fallback, in the slow tests only."""
    return partial(clipped_sum, method=request.param)


def test_equals_the_loop_in_float64(every_case, clip_by_any):
    model, loss_fn = every_case[0].double(), every_case[1]
    for num in (0, 1, 6):
        check_equal(clip_by_any, model, loss_fn, num)


@pytest.mark.parametrize("name", [name for name in MEMBERS if name.startswith("conv")])
def test_convolutions_equal_the_loop_with_unfolded_inputs_too(monkeypatch, name):
    """As on a GPU."""
    for module in ("outer_products", "matrix_rules"):
        monkeypatch.setattr(f"dpvision.dp.{module}.one_by_one_pays", lambda device: False)
    model, loss_fn = build(name)
    check_equal(clipped_sum, model.double(), loss_fn, 6)


def check_equal(clip_by, model, loss_fn, num):
    batch = make_batch(num, dtype=torch.float64)
    clip = middle_norm(loss_fn, model, batch, KEY) if num else 1.0
    total = clip_by(loss_fn, model, batch, KEY, max_grad_norm=clip)
    expected, norms, losses = clipped_sum_loop(loss_fn, model, batch, KEY, clip)
    assert total.grads.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(total.grads[name], value, rtol=0, atol=1e-12 * clip)
    assert total.num_records == num
    torch.testing.assert_close(
        total.norms_B.double(), torch.tensor(norms, dtype=torch.float64), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        total.losses_B.double(), torch.tensor(losses, dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert num < 2 or 0 < sum(norm > clip for norm in norms) < num


@pytest.mark.slow
def test_with_several_threads_it_equals_the_loop_and_repeats_its_bits(case):
    torch.set_num_threads(3)  # the conftest restores it
    model, loss_fn = case
    first, again = (
        clipped_sum(loss_fn, model, make_batch(6), KEY, max_grad_norm=0.2) for _ in range(2)
    )
    assert all(torch.equal(first.grads[name], again.grads[name]) for name in first.grads)
    assert torch.equal(first.norms_B, again.norms_B)
    check_equal(clipped_sum, model.double(), loss_fn, 6)


def test_equals_the_loop_in_float32(case, clip_by):
    model, loss_fn = case
    batch = make_batch(6)
    clip = middle_norm(loss_fn, model, batch, KEY)
    total = clip_by(loss_fn, model, batch, KEY, max_grad_norm=clip)
    expected = flat(clipped_sum_loop(loss_fn, model, batch, KEY, clip)[0])
    assert (flat(total.grads) - expected).norm() <= 1e-5 * expected.norm()
    assert all(value.dtype == torch.float32 for value in total.grads.values())


def test_accumulation_changes_nothing(case, clip_by):
    model, loss_fn = case[0].double(), case[1]
    batch = make_batch(6, dtype=torch.float64)
    whole = clip_by(loss_fn, model, batch, KEY, max_grad_norm=0.5)
    for sizes in ((2, 4), (1, 2, 3), (0, 6), (1,) * 6):
        total = ClippedSum.zeros(model, 0.5)
        for part in torch.arange(6).split(sizes):
            total = total + clip_by(loss_fn, model, rows(batch, part), KEY, max_grad_norm=0.5)
        torch.testing.assert_close(flat(total.grads), flat(whole.grads), rtol=0, atol=1e-14)
        assert total.num_records == 6 and total.max_grad_norm == 0.5
        torch.testing.assert_close(total.norms_B, whole.norms_B)
        torch.testing.assert_close(total.losses_B, whole.losses_B)


def test_chunk_size_changes_nothing(case, clip_by):
    model, loss_fn = case[0].double(), case[1]
    batch = make_batch(6, dtype=torch.float64)
    whole = clip_by(loss_fn, model, batch, KEY, max_grad_norm=0.5)
    for chunk_size in (1, 4, 64):
        chunked = clip_by(loss_fn, model, batch, KEY, max_grad_norm=0.5, chunk_size=chunk_size)
        torch.testing.assert_close(flat(chunked.grads), flat(whole.grads), rtol=0, atol=1e-14)


def test_sum_does_not_depend_on_rows(case, clip_by):
    """Masks are keyed by the record's id: in another order every record keeps its loss and its
    norm.
    """
    model, loss_fn = case[0].double(), case[1]
    batch = make_batch(6, dtype=torch.float64)
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    straight = clip_by(loss_fn, model, batch, KEY, max_grad_norm=0.5)
    shuffled = clip_by(loss_fn, model, rows(batch, order), KEY, max_grad_norm=0.5)
    torch.testing.assert_close(shuffled.losses_B, straight.losses_B[order])
    torch.testing.assert_close(shuffled.norms_B, straight.norms_B[order])
    torch.testing.assert_close(flat(shuffled.grads), flat(straight.grads), rtol=0, atol=1e-13)


def test_removing_replacing_or_scaling_a_record_moves_the_sum_by_at_most_c(every_case, clip_by_any):
    """In float32 without slack: what rounding adds is kept free. In float64 the slack is for the
    rounding of the sum.
    """
    check_sensitivity(clip_by_any, *every_case, torch.float32, 0.0)
    check_sensitivity(clip_by_any, *every_case, torch.float64, 1e-12)


def check_sensitivity(clip_by, model, loss_fn, dtype, slack):
    model, clip, num = model.to(dtype), 0.3, 4
    batch = make_batch(num, dtype=dtype)

    def total_of(batch):
        return flat(clip_by(loss_fn, model, batch, KEY, max_grad_norm=clip).grads)

    whole = total_of(batch)
    for j in range(num):
        assert (whole - total_of(rows(batch, [i for i in range(num) if i != j]))).norm() <= clip * (
            1 + slack
        )
    without = total_of(rows(batch, [0, 2, 3]))
    for scale in (1e-6, 30.0, 1e4, 1e8):
        image = batch.image_BVCHW.clone()
        image[1] *= scale
        other = total_of(batch._replace(image_BVCHW=image))
        assert (other - without).norm() <= clip * (1 + slack)
        assert (other - whole).norm() <= 2 * clip * (1 + slack)
    twin = Batch._make(None if value is None else value[[0, 3, 2, 3]] for value in batch)
    other = total_of(twin._replace(record_id_B=batch.record_id_B))
    assert (other - without).norm() <= clip * (1 + slack)


def test_automatic_clipping_stays_below_c(every_case, clip_by_any):
    """One record: its contribution is C g / (||g|| + 0.01), and shorter than C whatever the scale
    of the image.
    """
    model, loss_fn, clip = every_case[0].double(), every_case[1], 0.7
    batch, kept = make_batch(1, dtype=torch.float64), clip * (1 - reserve(torch.float64))
    for scale in (1e-3, 1.0, 1e4):
        scaled = batch._replace(image_BVCHW=batch.image_BVCHW * scale)
        total = clip_by_any(loss_fn, model, scaled, KEY, max_grad_norm=clip, rule="automatic")
        [(_, grads)] = per_record_gradients(loss_fn, model, scaled, KEY)
        norm = flat(grads).norm()
        torch.testing.assert_close(
            flat(total.grads), kept * flat(grads) / (norm + 0.01), rtol=0, atol=1e-12
        )
        assert flat(total.grads).norm() < clip


def test_loss_scale_is_undone_before_the_norm(case, clip_by):
    model, loss_fn = case
    plain = clip_by(loss_fn, model, make_batch(3), KEY, max_grad_norm=0.4)
    for loss_scale in (2.0**-10, 2.0**10):
        scaled = clip_by(
            loss_fn, model, make_batch(3), KEY, max_grad_norm=0.4, loss_scale=loss_scale
        )
        torch.testing.assert_close(flat(scaled.grads), flat(plain.grads), rtol=0, atol=1e-7)
        torch.testing.assert_close(scaled.norms_B, plain.norms_B, rtol=1e-6, atol=0)
        torch.testing.assert_close(scaled.losses_B, plain.losses_B, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1, 1, 7), (3, 8, 8), (3, 33, 41), (3, 224, 224)])
@pytest.mark.parametrize("clip", [1e-12, 0.1, 1.0, 1e12])
def test_float32_contribution_never_exceeds_c(clip_by_any, shape, clip):
    """Any gradient whatever, in float32, measured in float64: no slack."""
    generator = torch.Generator().manual_seed(3)
    model = GradientIsImage(*shape)
    batch = make_batch(1)
    for scale, shape_of_values in itertools.product(
        (1e-20, 1.0, 1.0000001, 1e3, 1e9, 1e17), ("normal", "equal", "one", "heavy")
    ):
        noise = torch.randn(1, 1, *shape, generator=generator)
        image = {
            "normal": noise,
            "equal": torch.ones_like(noise),
            "one": torch.zeros_like(noise),
            "heavy": noise.square() * noise.exp(),
        }[shape_of_values]
        image[..., 0, 0] = 1.0
        image = (image / image.norm() * clip * scale).clamp(-1e18, 1e18)
        total = clip_by_any(
            image_losses, model, batch._replace(image_BVCHW=image), KEY, max_grad_norm=clip
        )
        norm = total.grads["weight"].double().norm().item()
        assert norm <= clip * (1 - RESERVE) * (1 + 32 * torch.finfo(torch.float32).eps)
        true = image.double().norm().item()
        assert norm >= min(true, clip * (1 - RESERVE)) * (1 - 1e-5), (
            "clipped more than it had to be"
        )


def test_huge_batch_of_equal_records_keeps_each_contribution():
    """Summation does not hide an overshoot: the sum of n equal clipped records has norm at most n
    C.
    """
    model, num = GradientIsImage(3, 8, 8), 200
    image = make_batch(1, seed=5).image_BVCHW.expand(num, -1, -1, -1, -1) * 1e6
    total = clipped_sum(
        image_losses, model, make_batch(num)._replace(image_BVCHW=image), KEY, max_grad_norm=0.1
    )
    assert total.grads["weight"].double().norm() <= num * 0.1
    assert total.grads["weight"].double().norm() >= num * 0.1 * (1 - RESERVE) * (1 - 1e-5)


def test_record_that_is_not_finite_contributes_exactly_zero(every_case, clip_by_any):
    """In every kind of layer. Huge numbers may leave a finite gradient, which is then clipped like
    any other.
    """
    model, loss_fn = every_case
    batch = make_batch(4)
    others = clip_by_any(loss_fn, model, rows(batch, [0, 2, 3]), KEY, max_grad_norm=0.1)
    for poison in (torch.nan, torch.inf, 1e30):
        image = batch.image_BVCHW.clone()
        image[1, 0, 1, 2:5, 2:5] = poison
        total = clip_by_any(
            loss_fn, model, batch._replace(image_BVCHW=image), KEY, max_grad_norm=0.1
        )
        assert total.num_records == 4
        torch.testing.assert_close(total.norms_B[[0, 2, 3]], others.norms_B, rtol=1e-5, atol=0)
        moved = (flat(total.grads) - flat(others.grads)).norm()
        if total.norms_B[1].isfinite():
            assert poison == 1e30 and moved <= 0.1 * (1 + 1e-6)
        else:
            assert moved <= 1e-6 * 0.1  # the order of the sum


def test_only_records_that_are_not_finite_give_zeros(case, clip_by):
    model, loss_fn = case
    nothing = make_batch(2)._replace(image_BVCHW=torch.full((2, 1, 3, 8, 8), torch.nan))
    total = clip_by(loss_fn, model, nothing, KEY, max_grad_norm=1.0)
    assert (
        not flat(total.grads).any()
        and not total.norms_B.isfinite().any()
        and total.num_records == 2
    )


@pytest.mark.parametrize("max_grad_norm", [0.4, None])
def test_padding_is_not_in_the_sum_whatever_it_holds(case, clip_by_any, max_grad_norm):
    model, loss_fn = case
    batch = make_batch(5)
    image = batch.image_BVCHW.clone()
    image[1], image[4] = torch.nan, 1e20
    valid = torch.tensor([True, False, True, True, False])
    total = clip_by_any(
        loss_fn,
        model,
        batch._replace(image_BVCHW=image, valid_B=valid),
        KEY,
        max_grad_norm=max_grad_norm,
    )
    expected = clip_by_any(loss_fn, model, rows(batch, valid), KEY, max_grad_norm=max_grad_norm)
    other = clip_by_any(
        loss_fn, model, batch._replace(valid_B=valid), KEY, max_grad_norm=max_grad_norm
    )
    assert torch.equal(flat(total.grads), flat(other.grads)) and torch.equal(
        total.norms_B, other.norms_B
    )
    # Against the batch without padding, another shape: kernels may round another way.
    assert (flat(total.grads) - flat(expected.grads)).norm() <= 1e-6 * flat(expected.grads).norm()
    assert total.num_records == 3 and len(total.losses_B) == 3
    torch.testing.assert_close(total.norms_B, expected.norms_B, rtol=1e-6, atol=0)


def test_all_padding_is_zero(case, clip_by):
    model, loss_fn = case
    batch = make_batch(2)._replace(valid_B=torch.zeros(2, dtype=torch.bool))
    total = clip_by(loss_fn, model, batch, KEY, max_grad_norm=1.0)
    assert total.num_records == 0 and not flat(total.grads).any() and len(total.norms_B) == 0


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
        flat(
            clipped_sum(
                class_losses, model, batch._replace(image_BVCHW=view), KEY, max_grad_norm=clip
            ).grads
        )
        / 2
        for view in batch.image_BVCHW.split(1, 1)
    )
    assert (flat(total.grads) - separately).norm() > 1e-2 * clip, (
        "the test would not see views clipped one by one"
    )


def test_tied_parameter_stands_once_and_frozen_ones_not_at_all():
    with torch.random.fork_rng():
        torch.manual_seed(2)
        tied, frozen = zoo.Tied(), zoo.Frozen()
    batch = make_batch(3)
    assert set(clipped_sum(class_losses, tied, batch, KEY, max_grad_norm=1.0).grads) == {
        "down.weight",
        "up.bias",
    }
    names = {"body.0.weight", "body.2.bias", "unused"}
    assert set(clipped_sum(class_losses, frozen, batch, KEY, max_grad_norm=1.0).grads) == names
    plain = clipped_sum(class_losses, frozen, batch, KEY, max_grad_norm=None).grads
    assert set(plain) == names and not plain["unused"].any()
    frozen.body[0].bias.requires_grad_(True)
    thawed = clipped_sum(class_losses, frozen, batch, KEY, max_grad_norm=1e-3)
    assert set(thawed.grads) == names | {"body.0.bias"} and flat(thawed.grads).norm() <= 3e-3


def test_without_clip_it_is_the_plain_sum(case):
    model, loss_fn = case[0].double(), case[1]
    batch = make_batch(5, dtype=torch.float64)
    total = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=None)
    expected, _, losses = clipped_sum_loop(loss_fn, model, batch, KEY, float("inf"))
    torch.testing.assert_close(total.grads, expected, rtol=0, atol=1e-12)
    assert total.num_records == 5 and len(total.norms_B) == 0
    torch.testing.assert_close(
        total.losses_B.double(), torch.tensor(losses, dtype=torch.float64), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("max_grad_norm", [0.4, None])
def test_model_is_left_as_it_was(case, clip_by, max_grad_norm):
    model, loss_fn = case
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    random_state = torch.get_rng_state()
    clip_by(loss_fn, model, make_batch(3), KEY, max_grad_norm=max_grad_norm)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is None for p in model.parameters())
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert torch.equal(torch.get_rng_state(), random_state)


def test_running_statistics_take_nothing_from_the_data():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 5))
    clipped_sum(class_losses, model, make_batch(4), KEY, max_grad_norm=None)
    assert not model[1].running_mean.any() and model[1].num_batches_tracked == 0


@pytest.mark.parametrize(
    "setting",
    [
        {"rule": "soft"},
        {"method": "ghost"},
        {"loss_scale": 3.0},
        {"loss_scale": 0.0},
        {"loss_scale": float("inf")},
        {"loss_scale": float("nan")},
        {"max_grad_norm": float("nan")},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": -1.0},
        {"max_grad_norm": float("inf")},
        {"max_grad_norm": 1e-20},
        {"chunk_size": 0},
        {"rows": 0},
    ],
)
def test_unknown_settings_are_refused(setting):
    name = next(iter(setting))
    with pytest.raises(ConfigError, match=f"clip: {name}=.*; expected"):
        clipped_sum(
            image_losses,
            GradientIsImage(3, 8, 8),
            make_batch(2),
            KEY,
            **{"max_grad_norm": 1.0, **setting},
        )


def test_model_without_trained_parameters_is_refused():
    model = GradientIsImage(3, 8, 8).requires_grad_(False)
    with pytest.raises(ConfigError, match="Unfreeze"):
        clipped_sum(image_losses, model, make_batch(2), KEY, max_grad_norm=1.0)


def test_reduced_precision_products_are_refused():
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(PrivacyError, match="highest"):
            clipped_sum(
                image_losses, GradientIsImage(3, 8, 8), make_batch(2), KEY, max_grad_norm=1.0
            )
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        (torch.backends, "bf16"),
        (torch.backends.mkldnn.conv, "bf16"),
        (torch.backends.mkldnn.matmul, "bf16"),
        (torch.backends.mkldnn.rnn, "bf16"),
        (torch.backends.cuda.matmul, "tf32"),
    ],
)
def test_products_in_fewer_bits_by_a_backends_setting_are_refused(settings, value):
    """PyTorch's own word for all products stays "highest", or raises."""
    before = settings.fp32_precision
    try:
        settings.fp32_precision = value
        with pytest.raises(PrivacyError, match=r"precision='.*expected '"):
            clipped_sum(
                image_losses, GradientIsImage(3, 8, 8), make_batch(2), KEY, max_grad_norm=1.0
            )
    finally:
        settings.fp32_precision = before


def test_sums_with_different_clip_norms_do_not_add_up():
    model = GradientIsImage(3, 8, 8)
    with pytest.raises(PrivacyError, match="plan's max_grad_norm"):
        ClippedSum.zeros(model, 0.5) + clipped_sum(
            image_losses, model, make_batch(2), KEY, max_grad_norm=0.4
        )
    with pytest.raises(PrivacyError, match="plan's max_grad_norm"):
        ClippedSum.zeros(model, 0.5) + clipped_sum(
            image_losses, model, make_batch(2), KEY, max_grad_norm=None
        )


def test_host_rows_are_those_of_the_batch():
    batch, model = make_batch(4), zoo.Bare()
    host = HostRows(batch.record_id_B, batch.valid_B)
    sums = [
        clipped_sum(class_losses, model, batch, KEY, max_grad_norm=1.0, host=given).grads
        for given in (None, host)
    ]
    assert torch.equal(flat(sums[0]), flat(sums[1]))
    fewer = HostRows(host.record_id_B[:3], host.valid_B[:3])
    with pytest.raises(PrivacyError, match="host= has other ids"):
        clipped_sum(class_losses, model, batch, KEY, max_grad_norm=1.0, host=fewer)
