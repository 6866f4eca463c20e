"""Settings of the optimizer, its schedule and averaging."""

import math
from dataclasses import dataclass
from typing import Literal

from dpvision.config.checks import check_choices, require

LAMB_EPS = 1e-12
"""eps of DP-LAMB and DP-Adam in transfer. Mehta et al. 2022 do not state theirs. Noise in a mean
over 1.3 million images is about 1e-6 for each coordinate, as large as the usual 1e-6; far below it,
one step from zero is the sign of each coordinate, as the paper says.
"""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer, schedule and averaging of privatized gradients: post-processing, at no privacy
    cost.
    """

    name: Literal["adamw", "sgd", "lamb"] = "adamw"
    """'lamb' (You et al. 2020) adapts every parameter's rate to its norm; decay is then part of the
    adapted update, as published.
    """
    learning_rate: float | None = 3.84e-4
    """Peak rate, not scaled by the batch size. If None, it is set by the public rule of the head
    many_steps (``adapt.defaults``); the run's config then has its value.
    """
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    """For adamw and lamb; DP transfer has ``LAMB_EPS``."""
    momentum: float = 0.9
    """For sgd only."""
    weight_decay: float = 0.005
    """Decoupled weight decay."""
    decayed: Literal["all", "matrices"] = "all"
    """Trained parameters that decay: all (ViP), or those with at least two dimensions (MAE)."""
    schedule: Literal["vip", "cosine", "linear", "constant"] = "vip"
    """'vip': lr x min((t + 1) / warmup_steps, (1 + cos(pi t / T)) / 2). 'cosine' (MAE): the same
    warm-up, then a cosine from its end on. 'linear' (DP-Cap): the same warm-up, then a straight
    line. 'constant': the same warm-up, then level.
    """
    decay_horizon: float = 1.0
    """Where cosine and linear reach zero, in multiples of the run's steps (DP-Cap: 2, so that the
    last rate is well above zero).
    """
    warmup_steps: int = 0
    pretrained_multiplier: float = 1.0
    """Factor of the rate for every parameter outside the module ``head``: pretrained weights may
    need a smaller rate (alpha of Mehta et al. 2022, table 7).
    """
    global_clip: float | None = None
    """Norm to which the whole released gradient is clipped before the optimizer step, as usual
    without privacy; it bounds no record's contribution. If None, no clipping.
    """
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights, with a warm-up (optim/ema.py); if
    None, no average (ViP).
    """
    average: bool = False
    """Keep the mean of the weights after each step (Mehta et al. 2022, algorithm 1) instead of an
    EMA.
    """

    def __post_init__(self) -> None:
        check_choices(self)
        w = "optim"
        rate = self.learning_rate
        require(
            rate is None or 0 < rate < math.inf,
            w,
            "learning_rate",
            rate,
            "a positive number",
            "ViP: 3.84e-4.",
        )
        require(
            all(0 <= b < 1 for b in self.betas),
            w,
            "betas",
            self.betas,
            "two numbers in [0, 1)",
            "ViP: (0.9, 0.95).",
        )
        require(0 < self.eps < math.inf, w, "eps", self.eps, "a positive number", "ViP: 1e-8.")
        require(0 <= self.momentum < 1, w, "momentum", self.momentum, "in [0, 1)", "Use 0.9.")
        require(
            0 <= self.weight_decay < math.inf,
            w,
            "weight_decay",
            self.weight_decay,
            "0 or more",
            "ViP: 0.005.",
        )
        require(
            self.warmup_steps >= 0, w, "warmup_steps", self.warmup_steps, "0 or more", "ViP: 1000."
        )
        require(
            1 <= self.decay_horizon < math.inf,
            w,
            "decay_horizon",
            self.decay_horizon,
            "1 or more",
            "DP-Cap: 2.",
        )
        alpha = self.pretrained_multiplier
        require(
            0 < alpha < math.inf,
            w,
            "pretrained_multiplier",
            alpha,
            "a positive number",
            "To train the head alone: --model.tuned head.",
        )
        if self.global_clip is not None:
            require(
                0 < self.global_clip < math.inf,
                w,
                "global_clip",
                self.global_clip,
                "a positive number",
                "Leave it out for none.",
            )
        if self.ema_decay is not None:
            require(
                0 < self.ema_decay < 1,
                w,
                "ema_decay",
                self.ema_decay,
                "strictly between 0 and 1",
                "Leave it out for none.",
            )
        require(
            not (self.average and self.ema_decay is not None),
            w,
            "average",
            True,
            "False with ema_decay: one average",
            "Drop one.",
        )

    @property
    def rate(self) -> float:
        """float: the learning rate; raises ConfigError if a rule has not set it yet."""
        require(
            self.learning_rate is not None,
            "optim",
            "learning_rate",
            None,
            "a positive number",
            "Only the head many_steps has a rule.",
        )
        assert self.learning_rate is not None
        return self.learning_rate

    @property
    def averages(self) -> bool:
        """bool: whether averaged weights are kept."""
        return self.average or self.ema_decay is not None
