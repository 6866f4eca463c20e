"""Fingerprints of gradients, against the gradients themselves."""

import pytest
import torch
from torch import Tensor, nn

from dpvision.doctor.bench import peak_bytes
from dpvision.dp import fingerprint as module
from dpvision.dp.fingerprint import NotFinite, fingerprint, norms_of, scattered, values_of
from dpvision.dp.separable import seen_by_biases

PIECE = 2**16


@pytest.fixture(autouse=True, params=[0, 2**20])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Numbers up to which a gradient is its own fingerprint."""
    monkeypatch.setattr(module, "_SMALL", request.param)
    return request.param


def projection(value: Tensor) -> Tensor:
    return values_of([value])


SIZES = (1, 63, 64, 65, 1000, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7)


def leaf(size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def of_values(*values: Tensor):
    """The fingerprint of a gradient with these values."""
    leaves = [torch.zeros_like(value).requires_grad_() for value in values]
    loss = sum((one * value).sum() for one, value in zip(leaves, values, strict=True))
    return fingerprint(loss, leaves)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_bit_of_one_number_is_a_difference(size: int, dtype: torch.dtype) -> None:
    value = leaf(size, dtype=dtype).detach()
    before = of_values(value)
    assert before.equals(of_values(value.clone()))
    for place in {0, size // 2, size - 1}:
        moved = value.clone()
        bits = moved.view(torch.int64 if dtype == torch.float64 else torch.int16)
        bits[place * (len(bits) // size)] ^= 1
        assert not before.equals(of_values(moved))


def test_zeros_of_either_sign_are_equal_as_in_torch_equal() -> None:
    assert of_values(torch.tensor([0.0, -0.0, 1.0])).equals(
        of_values(torch.tensor([-0.0, 0.0, 1.0]))
    )


@pytest.mark.parametrize("size", SIZES)
def test_distances_are_those_of_the_gradients_up_to_a_factor_of_two(size: int) -> None:
    value, other = leaf(size).detach(), leaf(size, 1).detach()
    for scale in (1.0, 1e-9):
        moved = value + scale * other
        found = of_values(value).distance(of_values(moved))
        assert 0.5 < found / float((moved - value).norm()) < 2.0
    assert of_values(value).norm == pytest.approx(float(value.norm()), rel=1e-12)


def test_two_numbers_that_change_places_do_not_cancel() -> None:
    """Wherever they stand: their projections differ by their places."""
    value = leaf(3 * PIECE).detach()
    for a, b in ((0, 1), (0, 64), (5, 5 + PIECE), (7, 7 + 2 * PIECE), (PIECE, 2 * PIECE - 64)):
        moved = value.clone()
        moved[[a, b]] = value[[b, a]]
        true = float((moved - value).norm())
        assert float((projection(moved) - projection(value)).norm()) > 1e-3 * true


def test_a_projection_is_linear() -> None:
    a, b = leaf(PIECE + 9).detach(), leaf(PIECE + 9, 1).detach()
    torch.testing.assert_close(
        projection(2 * a - b), 2 * projection(a) - projection(b), rtol=1e-12, atol=1e-10
    )


def test_it_is_of_the_gradient_that_autograd_gives_and_leaves_the_parameters_as_they_were() -> None:
    torch.manual_seed(0)
    tied = nn.Linear(5, 5).double()
    model = nn.Sequential(tied, nn.Tanh(), tied, nn.LayerNorm(5).double())
    unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    params = [*model.parameters(), unused]
    kept = [torch.ones_like(p) if n % 2 else None for n, p in enumerate(params)]
    for p, grad in zip(params, kept, strict=True):
        p.grad = grad
    loss = model(torch.randn(7, 5, dtype=torch.float64)).square().sum()
    truth = torch.autograd.grad(
        loss, params, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    for _ in range(2):  # the graph remains
        found = fingerprint(loss, params)
        torch.testing.assert_close(found.values, values_of(truth), rtol=0, atol=0)
        for value, norm in zip(truth, norms_of(found.values, params), strict=True):
            assert 0.5 * float(value.norm()) <= norm <= 2.0 * float(value.norm())
        assert found.equals(of_values(*truth)) and found.is_finite
    assert all(p.grad is grad for p, grad in zip(params, kept, strict=True))
    assert not any(p._post_accumulate_grad_hooks for p in params)


@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_a_number_that_is_not_finite_is_seen_and_a_large_one_is_finite(number: float) -> None:
    value = leaf(1000).detach()
    value[500] = 1e300  # its square is infinite
    assert of_values(value).is_finite
    value[501] = number
    assert not of_values(value).is_finite
    one = torch.zeros(1000, dtype=torch.float64).requires_grad_()
    with pytest.raises(NotFinite):
        fingerprint((one * value).sum(), [one], require_finite=True)
    assert one.grad is None and not one._post_accumulate_grad_hooks


def test_no_gradient_of_a_large_model_is_held(small: int) -> None:
    if small:
        pytest.skip("of a small model it is")
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(40))).double()
    params = list(model.parameters())
    whole = sum(p.nbytes for p in params)
    loss = model(torch.ones(1, 256, dtype=torch.float64)).sum()
    fingerprint(loss, params)  # makes its constants
    assert peak_bytes(lambda: torch.autograd.grad(loss, params, retain_graph=True)) > 0.9 * whole
    assert peak_bytes(lambda: fingerprint(loss, params)) < 0.2 * whole


def test_only_weights_of_plain_layers_with_a_trained_bias_of_their_own_are_left_to_it() -> None:
    class Own(nn.Linear):
        pass

    left, conv = nn.Linear(4, 4), nn.Conv2d(3, 4, 1)
    without, frozen, own = nn.Linear(4, 4, bias=False), nn.Linear(4, 4), Own(4, 4)
    frozen.bias.requires_grad_(False)
    shared, table = nn.Linear(4, 6), nn.Embedding(6, 4)
    shared.weight = table.weight
    model = nn.ModuleList([left, conv, without, frozen, own, shared, table, nn.LayerNorm(4)])
    assert seen_by_biases(model) == {id(left.weight), id(conv.weight)}


def test_signs_do_not_cancel() -> None:
    """A sign is the highest bit: in a sum of products modulo 2^64 any two would cancel."""
    p = torch.randn(2**20 + 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = p.square().sum() / 2
    first = fingerprint(loss, [p])
    assert not fingerprint(-loss, [p]).equals(first) and fingerprint(1 * loss, [p]).equals(first)
    assert not fingerprint(2 * loss, [p]).equals(first)
    flipped = p.detach().clone()
    flipped[[3, 70_000]] *= -1
    assert not fingerprint((p * flipped).sum(), [p]).equals(first)
    numbers = torch.randint(-(2**63), 2**63 - 1, (2**16,), generator=torch.Generator())
    assert len(scattered(numbers).unique()) == len(numbers.unique()), "one for one"
