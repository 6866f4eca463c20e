"""A head by many private gradient steps (Mehta et al. 2022, algorithm 1).

    g_t = (sum of clipped gradients + noise) / expected_batch_size,    W_{t+1} = optimizer(W_t, g_t)

The noise is added before the division, as in their equation 4 (algorithm 1 of the paper has it the
other way round). The default rate, number of steps and frequency decay follow from the plan
(``adapt.defaults``).

Legend: E row width (``FeatureStream.width``), K classes.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from dpvision.adapt import defaults
from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.gradient import Loss, gradient_sum, sum_at_zero
from dpvision.adapt.heads.kind import AfterStep, Fitted, HeadKind, Progress, Task, Trained
from dpvision.adapt.integer_rows import IntegerStream
from dpvision.adapt.release import Releases
from dpvision.config import HeadConfig, OptimConfig, RunConfig
from dpvision.config.heads import ManySteps
from dpvision.errors import ConfigError
from dpvision.optim.ema import make_ema, update_ema
from dpvision.optim.optimizer import Optimizer
from dpvision.optim.schedule import learning_rate
from dpvision.privacy.plan import DPPlan

Init = Literal["zero", "lecun"]


def many_steps(
    stream: FeatureStream,
    releases: Releases,
    *,
    loss: Loss = "softmax",
    optim: OptimConfig = ManySteps.optim,
    bias: float = 0.0,
    init: Init = "zero",
    init_scale: float = 1.0,
    seed: int = 0,
    start: Progress | None = None,
    after_step: AfterStep = lambda trained: None,
) -> Trained:
    """Train a head for all steps left in the plan: DP-SGD with momentum, DP-Adam or DP-LAMB by
    ``optim.name``.

    If ``releases.stop()`` becomes true, return the head after the step in progress.

    Args:
        optim: its schedule spans the steps done and left. If its learning rate is None,
            ``defaults.steps_rate`` sets it.
        bias: fixed, the same for all classes. Set ``stream.constant`` to train a bias.
        init: zero weights, or LeCun's: normal with variance 1 / E, times ``init_scale``.
        seed: of the initial weights; public.
        start: go on from these steps of an earlier start.
        after_step: called with a function that returns the heads so far.

    Raises:
        ConfigError: no step is left, or the loss does not fit the labels.
    """
    # The state is the weight, the optimizer's moments, the mean of the weights so far and their
    # moving average; a start brings all four. Each turn releases one clipped, noised gradient at
    # the current weight, and everything after that is post-processing of it. Rows become integers
    # once, so that their products with a weight are exact; a single step from zeros needs none.
    check_loss(stream, loss)
    done = 0 if start is None else start.done
    # Steps that were charged and lost in a crash shorten the schedule.
    steps = done + releases.left
    if not releases.left:
        raise ConfigError(
            "adapt: steps=0; expected at least one step left in the plan. Give more "
            "--privacy.steps."
        )
    optim = defaults.with_rate(optim, releases.plan)
    head = _Weight(
        _initial(stream, init, init_scale, seed) if start is None else start.last_KE.clone()
    )
    bias_K = torch.full((stream.num_classes,), bias)
    optimizer = Optimizer(optim, head)
    ema = make_ema(head) if optim.ema_decay is not None else None
    mean_KE = torch.zeros(head.weight.shape, dtype=torch.float64)
    if start is not None:
        optimizer.load(start.optimizer)
        mean_KE += start.mean_KE
        if ema is not None and start.ema_KE is not None:
            ema["weight"].copy_(start.ema_KE)

    def trained() -> Trained:
        last_KE, ema_KE = (
            head.weight.detach().clone(),
            None if ema is None else ema["weight"].clone(),
        )
        # Copied: the optimizer goes on in place.
        state = {name: value.clone() for name, value in optimizer.tensors().items()}
        heads = (
            None if weight_KE is None else stream.head(weight_KE, bias_K)
            for weight_KE in (last_KE, mean_KE, ema_KE)
        )
        last, average, averaged = heads
        assert last is not None and average is not None
        return Trained(
            last, average, averaged, Progress(done, last_KE, mean_KE.clone(), ema_KE, state)
        )

    rows, first = IntegerStream(stream), done
    while releases.left and not (done > first and releases.stop()):
        weight_KE = head.weight.detach()
        if steps == 1 and not weight_KE.any():
            _, gradient = releases.release(
                stream,
                lambda blocks: sum_at_zero(blocks, stream.width, bias_K, loss, releases.plan),
            )
        else:
            _, gradient = releases.release(
                rows,
                lambda blocks: gradient_sum(blocks, weight_KE, bias_K, loss, releases.plan),  # noqa: B023
            )
        optimizer.step(gradient, learning_rate(optim, done, steps))
        mean_KE += (head.weight.detach() - mean_KE) / (done + 1)
        if ema is not None and optim.ema_decay is not None:
            update_ema(ema, head, optim.ema_decay, done)
        done += 1
        after_step(trained)
    return trained()


def check_loss(stream: FeatureStream, loss: Loss) -> None:
    """Refuse a softmax over classes that do not exclude one another."""
    if loss == "softmax" and stream.multi_label:
        raise ConfigError(
            "adapt: loss='softmax' for records of several labels; expected one label each. Use "
            "loss='sigmoid'."
        )


class _Weight(nn.Module):
    """The trained weight, as a module for the optimizer."""

    def __init__(self, weight_KE: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_KE)


def _initial(stream: FeatureStream, init: Init, scale: float, seed: int) -> Tensor:
    shape = stream.num_classes, stream.width
    if init == "zero":
        return torch.zeros(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (
        scale / math.sqrt(stream.width)
    )


class _ManySteps(HeadKind):
    name = "many_steps"

    def fit(self, task: Task) -> Fitted:
        own: ManySteps = task.settings
        assert own.loss != "auto" and own.bias is not None
        trained = many_steps(
            task.stream,
            task.releases,
            loss=own.loss,
            optim=task.config.optim,
            bias=own.bias,
            init=own.init,
            init_scale=own.init_scale,
            seed=task.config.seed,
            start=task.start,
            after_step=lambda made: task.after_step(lambda: made().fitted(own.iterate)),
        )
        return trained.fitted(own.iterate)

    def enough_steps(self, plan: DPPlan, optim: OptimConfig) -> int:
        return defaults.enough_steps(plan, optim.momentum)

    def frequency_decay(self, plan: DPPlan) -> float:
        return defaults.frequency_decay(plan)

    def plan_lines(self, config: RunConfig, plan: DPPlan) -> list[str]:
        optim = config.optim
        assert isinstance(config.model, HeadConfig)
        if optim.name != "sgd":
            return []
        noise, decay = (
            defaults.final_noise(plan, optim),
            config.model.features.frequency_decay or 1.0,
        )
        lines = [
            f"steps                {plan.steps} at learning rate {optim.rate:.4g}, "
            f"momentum {optim.momentum:g}"
            + (f": noise of {noise:.2g} in each weight at the end" if noise else "")
        ]
        if decay > 1:
            lines.append(
                f"frequencies          energy of each higher one divided by {decay:.3g}, to "
                "favour low ones against noise"
            )
        return lines


MANY_STEPS = _ManySteps()
