"""Learning rate as a function of the step; the step is the ledger's count, so a resumed run goes on where the budget stands."""

import math

from dpvision.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Rate of logical step ``step`` of ``steps``.

    'vip' is lr(t) = lr x min((t + 1) / warmup_steps, (1 + cos(pi t / T)) / 2); 'constant' drops the cosine.

    Args:
        step: t in [0, steps).
        steps: T, from the plan.

    Returns:
        A positive number, at most ``config.learning_rate``.

    >>> learning_rate(OptimConfig(learning_rate=1.0, warmup_steps=10), 0, 100)
    0.1
    """
    warmup = (step + 1) / config.warmup_steps if config.warmup_steps else 1.0
    level = (1 + math.cos(math.pi * step / steps)) / 2 if config.schedule == "vip" else 1.0
    return config.learning_rate * min(1.0, warmup, level)
