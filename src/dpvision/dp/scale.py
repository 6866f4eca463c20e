"""The loss scale of float16 training, from public inputs only: the weights, the step's key and a
fixed public batch.

A scale driven by overflows of private gradients, as in torch's GradScaler, is an output computed
from private data that no accountant sees (docs/privacy.md). Here a private record that overflows
contributes zero and changes nothing else.
"""

from torch import nn

from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import LossFn, clipped_sum

_LARGEST, _SMALLEST = 24, -8
_HEADROOM = 4
"""Binary orders of magnitude by which private gradients may be larger than the public ones before
they overflow.
"""


def public_loss_scale(
    loss_fn: LossFn, model: nn.Module, public_batch: Batch, key: StepKey
) -> float:
    """Return the largest power of two at which no gradient of the public batch overflows, less
    headroom; under the caller's autocast.

    Args:
        public_batch: a few public records, in the run's shapes and on the model's device.

    Returns:
        A power of two between 2^-12 and 2^20.
    """
    low, high = _SMALLEST, _LARGEST + 1  # exponents: bisection, five passes over the public batch
    while high - low > 1:
        middle = (low + high) // 2
        total = clipped_sum(
            loss_fn,
            model,
            public_batch,
            key,
            max_grad_norm=1.0,
            loss_scale=2.0**middle,
            check_separability=False,
        )
        if bool(total.norms_B.isfinite().all()):
            low = middle
        else:
            high = middle
    return 2.0 ** (low - _HEADROOM)
