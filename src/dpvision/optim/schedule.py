"""Learning rate as a function of the step; the step is the ledger's count, so a resumed run
continues at the budget's position.
"""

import math

from dpvision.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of logical step ``step`` of ``steps``.

    'vip' is lr(t) = lr x min((t + 1) / W, (1 + cos(pi t / T)) / 2), W the warm-up; 'cosine' (MAE)
    is the same warm-up, then lr x (1 + cos(pi s)) / 2 with s = (t - W) / (h T - W) from t = W on, h
    the decay horizon; 'linear' (DP-Cap) is the same with 1 - s; 'constant' drops the decay.

    Args:
        step: t in [0, steps).
        steps: T, from the plan.

    Returns:
        A positive number, at most ``config.learning_rate``.

    >>> learning_rate(OptimConfig(learning_rate=1.0, warmup_steps=10), 0, 100)
    0.1
    """
    warmup = (step + 1) / config.warmup_steps if config.warmup_steps else 1.0
    share = max(
        0.0,
        (step - config.warmup_steps) / max(1.0, config.decay_horizon * steps - config.warmup_steps),
    )
    level = 1.0
    if config.schedule == "vip":
        level = (1 + math.cos(math.pi * step / steps)) / 2
    elif config.schedule == "cosine":
        level = (1 + math.cos(math.pi * share)) / 2
    elif config.schedule == "linear":
        level = 1 - share
    return config.rate * min(1.0, warmup, level)
