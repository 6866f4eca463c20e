"""A head by private gradient steps: one (Mehta et al. 2022, figure 1b) or many (their algorithm 1).

    g_t = (sum of clipped gradients + noise) / expected_batch_size,    W_{t+1} = optimizer(W_t, g_t)

The noise is added before the division, as in their equation 4 (algorithm 1 of the paper has it the
other way round). From a head of zeros one step of Adam is -rate x sign(g), and LAMB's is the same,
since a weight of norm zero gets the trust ratio 1. No learning rate has to be tuned: all scores are
proportional to it, so the predicted class does not depend on it.

Legend: E row width (``FeatureStream.width``), K classes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.gradient import Loss, gradient_sum, sum_at_zero
from dpvision.adapt.integer_rows import IntegerStream
from dpvision.adapt.rate import with_rate
from dpvision.adapt.release import Releases
from dpvision.config import LAMB_EPS, OptimConfig
from dpvision.errors import ConfigError
from dpvision.optim.ema import make_ema, update_ema
from dpvision.optim.optimizer import Optimizer
from dpvision.optim.schedule import learning_rate

BIAS = -10.0
"""The paper's fixed bias: every class starts with a probability near 0, which is right for most
classes when there are many.
"""
ONE_STEP = OptimConfig(
    name="lamb", learning_rate=1e-3, eps=LAMB_EPS, weight_decay=0.0, schedule="constant"
)
"""Adam's eps is far below any noisy gradient, so the step is the sign of each coordinate."""
MANY_STEPS = OptimConfig(
    name="sgd", learning_rate=None, momentum=0.9, weight_decay=0.0, schedule="constant"
)

Init = Literal["zero", "lecun"]


@dataclass(frozen=True)
class Coordinates:
    """The coordinates that ``feature_covariance`` takes its steps in, from the covariance that it
    released first.
    """

    map_EE: Tensor
    """float32; a row becomes map x."""
    rate: float
    """Learning rate of a step."""
    releases: int
    """Number of releases that measured the covariance."""


@dataclass(frozen=True)
class Progress:
    """Where a sequence of steps stands. All of it is post-processing of releases, so it may be
    saved and published.
    """

    done: int
    """Number of steps in the weights."""
    last_KE: Tensor
    """float32."""
    mean_KE: Tensor
    """Mean of the weights after each step, float64."""
    ema_KE: Tensor | None
    optimizer: dict[str, Tensor]
    coordinates: Coordinates | None = None
    """None if steps are taken on the stream's own rows."""

    @property
    def releases(self) -> int:
        """Number of releases in the weights: the steps, and those that measured the coordinates."""
        return self.done + (0 if self.coordinates is None else self.coordinates.releases)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything but ``done`` by name."""
        found = {
            "last": self.last_KE,
            "mean": self.mean_KE,
            **{f"optimizer/{name}": x for name, x in self.optimizer.items()},
        }
        if self.ema_KE is not None:
            found["ema"] = self.ema_KE
        if (own := self.coordinates) is not None:
            rate, releases = torch.tensor(own.rate, dtype=torch.float64), torch.tensor(own.releases)
            found |= {
                "coordinates/map": own.map_EE,
                "coordinates/rate": rate,
                "coordinates/releases": releases,
            }
        return found

    @classmethod
    def of(cls, releases: int, tensors: dict[str, Tensor]) -> Self:
        """Return the progress with these ``releases`` and ``tensors()``."""
        optimizer = {
            name.removeprefix("optimizer/"): x
            for name, x in tensors.items()
            if name.startswith("optimizer/")
        }
        own, done = None, releases
        if "coordinates/map" in tensors:
            own = Coordinates(
                tensors["coordinates/map"],
                float(tensors["coordinates/rate"]),
                int(tensors["coordinates/releases"]),
            )
            done -= own.releases
        return cls(done, tensors["last"], tensors["mean"], tensors.get("ema"), optimizer, own)


@dataclass(frozen=True)
class Trained:
    """The heads that one sequence of steps yields. All are released, so choosing among them by a
    public rule costs no privacy.
    """

    last: Head
    average: Head
    """Mean of the weights after each step (algorithm 1)."""
    ema: Head | None
    """Exponential moving average of the weights, or None if ``optim.ema_decay`` is None."""
    progress: Progress
    """What ``many_steps`` needs to go on from here."""


AfterStep = Callable[[Callable[[], Trained]], None]


def one_step(
    stream: FeatureStream,
    releases: Releases,
    *,
    loss: Loss = "sigmoid",
    optim: OptimConfig = ONE_STEP,
    bias: float = BIAS,
) -> Head:
    """Train a head by one gradient step from zero weights.

    Args:
        releases: must have exactly one step left. The paper uses a full batch.
        optim: lamb and adamw step by the sign of the noisy gradient, sgd by the gradient itself.
            The rate changes no prediction.
        bias: fixed, the same for all classes. It has no effect with the softmax loss.

    Raises:
        ConfigError: more than one step is left, or the loss does not fit the labels.
    """
    if releases.left != 1:
        raise ConfigError(
            f"adapt: steps={releases.left}; expected 1 for one_step. Plan one step, or use "
            "many_steps."
        )
    return many_steps(stream, releases, loss=loss, optim=optim, bias=bias).last


def many_steps(
    stream: FeatureStream,
    releases: Releases,
    *,
    loss: Loss = "softmax",
    optim: OptimConfig = MANY_STEPS,
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
            ``rate.steps_rate`` sets it.
        bias: fixed, the same for all classes. Set ``stream.constant`` to train a bias.
        init: zero weights, or LeCun's: normal with variance 1 / E, times ``init_scale``.
        seed: of the initial weights; public.
        start: go on from these steps of an earlier start.
        after_step: called with a function that returns the heads so far.

    Raises:
        ConfigError: no step is left, or the loss does not fit the labels.
    """
    check_loss(stream, loss)
    done = 0 if start is None else start.done
    # Steps that were charged and lost in a crash shorten the schedule.
    steps = done + releases.left
    if not releases.left:
        raise ConfigError(
            "adapt: steps=0; expected at least one step left in the plan. Give more "
            "--privacy.steps."
        )
    optim = with_rate(optim, releases.plan)
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
