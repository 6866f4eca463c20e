"""What transfer adds behind the wall: another rate for what was pre-trained, the mean of the
iterates, the clip of a whole gradient.
"""

import pytest
import torch
from made import released
from torch import nn

from dpvision.config import OptimConfig
from dpvision.dp.noise import DPGradient
from dpvision.errors import ConfigError
from dpvision.optim.ema import make_ema, update_average
from dpvision.optim.optimizer import Optimizer

NAMES = pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.ModuleDict(
        {"encoder": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), "head": nn.Linear(4, 2)}
    )


def _gradients(model: nn.Module, steps: int, scale: float = 1.0) -> list[DPGradient]:
    g = torch.Generator().manual_seed(5)
    return [
        released(
            {n: scale * torch.randn(p.shape, generator=g) for n, p in model.named_parameters()}
        )
        for _ in range(steps)
    ]


def _run(
    config: OptimConfig, gradients: list[DPGradient], rates: list[float]
) -> dict[str, torch.Tensor]:
    model = _model()
    optimizer = Optimizer(config, model)
    for gradient, rate in zip(gradients, rates, strict=True):
        optimizer.step(gradient, rate)
    return {name: p.detach() for name, p in model.named_parameters()}


@NAMES
def test_the_multiplier_is_a_smaller_rate_for_all_but_the_head(name: str) -> None:
    """The head moves as at the whole rate, the rest as at a tenth of it, decay included: no update
    looks at other parameters.
    """
    gradients, rates = _gradients(_model(), 4), [0.1, 0.2, 0.1, 0.05]
    settings = {"name": name, "weight_decay": 0.1, "momentum": 0.5}
    both = _run(OptimConfig(pretrained_multiplier=0.1, **settings), gradients, rates)  # type: ignore[arg-type]
    whole = _run(OptimConfig(**settings), gradients, rates)  # type: ignore[arg-type]
    tenth = _run(OptimConfig(**settings), gradients, [0.1 * rate for rate in rates])  # type: ignore[arg-type]
    for key, value in both.items():
        torch.testing.assert_close(
            value, whole[key] if key.startswith("head") else tenth[key], rtol=1e-5, atol=1e-7
        )
    assert not torch.equal(whole["encoder.0.weight"], tenth["encoder.0.weight"])


@NAMES
def test_with_a_multiplier_it_resumes_bit_for_bit(name: str) -> None:
    config = OptimConfig(name=name, learning_rate=0.01, pretrained_multiplier=0.1)  # type: ignore[arg-type]
    whole, first = _model(), _model()
    gradients = _gradients(whole, 4)
    one, two = Optimizer(config, whole), Optimizer(config, first)
    for gradient in gradients:
        one.step(gradient, 0.01)
    for gradient in gradients[:2]:
        two.step(gradient, 0.01)
    second = _model()
    second.load_state_dict(first.state_dict())
    three = Optimizer(config, second)
    three.load(two.tensors())
    for gradient in gradients[2:]:
        three.step(gradient, 0.01)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True)
    )


def test_a_multiplier_without_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pretrained_multiplier=0\.1; expected 1"):
        Optimizer(OptimConfig(pretrained_multiplier=0.1), nn.Linear(2, 2))


@pytest.mark.parametrize("length", [0.5, 1e6])
def test_the_global_clip_shortens_the_whole_gradient_and_never_lengthens_it(length: float) -> None:
    gradient = _gradients(_model(), 1, scale=3.0)[0]
    before, plain = _model(), OptimConfig(name="sgd", momentum=0.0, weight_decay=0.0)
    start = {name: p.detach().clone() for name, p in before.named_parameters()}
    moved = _run(
        OptimConfig(name="sgd", momentum=0.0, weight_decay=0.0, global_clip=length),
        [gradient],
        [1.0],
    )
    step = torch.cat([(start[name] - moved[name]).flatten() for name in start])
    whole = torch.cat([g.flatten() for g in gradient.grads.values()])
    assert float(step.norm()) == pytest.approx(min(length, float(whole.norm())), rel=1e-5)
    assert float(step @ whole / (step.norm() * whole.norm())) == pytest.approx(1, abs=1e-6)
    if length > whole.norm():
        assert all(
            torch.equal(value, moved[name])
            for name, value in _run(plain, [gradient], [1.0]).items()
        )


def test_a_gradient_of_zeros_and_one_that_is_not_finite_pass_the_global_clip() -> None:
    """Without a guarantee a step may be either; neither is a division by zero of ours."""
    model = _model()
    optimizer = Optimizer(
        OptimConfig(name="sgd", momentum=0.0, weight_decay=0.0, global_clip=1.0), model
    )
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step(released({n: torch.zeros_like(p) for n, p in model.named_parameters()}), 1.0)
    assert all(torch.equal(p, start[name]) for name, p in model.named_parameters())
    optimizer.step(
        released({n: torch.full_like(p, torch.nan) for n, p in model.named_parameters()}), 1.0
    )
    assert all(p.isnan().all() for p in model.parameters())


def test_the_average_is_the_mean_of_the_iterates_whatever_it_started_from() -> None:
    model = _model()
    config = OptimConfig(average=True)
    mean, seen = make_ema(model), []
    for t in range(7):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(t)))
        seen.append({name: p.double().clone() for name, p in model.state_dict().items()})
        update_average(mean, model, config, t)
    for name, value in mean.items():
        torch.testing.assert_close(
            value.double(),
            torch.stack([weights[name] for weights in seen]).mean(0),
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pretrained_multiplier": 0.0}, "pretrained_multiplier=0.0; expected a positive number"),
        ({"pretrained_multiplier": float("nan")}, "pretrained_multiplier=nan"),
        ({"global_clip": 0.0}, "global_clip=0.0; expected a positive number"),
        ({"average": True, "ema_decay": 0.9}, "average=True; expected False with ema_decay"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OptimConfig(**changes)
