"""Class probabilities of an image of any size from a network for squares, averaged over overlapping
windows.

Legend: B windows, K classes, C channels, H height, W width.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

_CLASSES_AT_ONCE = 16


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """Return the start of each window along one side: ``stride`` apart, the last one aligned with
    the end.

    >>> window_starts(683, 512, 341)
    [0, 171]
    """
    count = max(0, math.ceil((length - window) / stride)) + 1
    return [min(i * stride, max(length - window, 0)) for i in range(count)]


def window_probabilities(
    network: Callable[[Tensor], Tensor],
    x_CHW: Tensor,
    window: int,
    stride: int,
    *,
    batch_size: int = 8,
) -> Tensor:
    """Return each pixel's class probabilities, averaged over the windows that contain it, float32
    (K, H, W).

    Args:
        network: function from x_BCHW of side ``window`` to logits (B, K, window, window).
        x_CHW: normalised; a side shorter than the window is padded with zeros, which the result
            does not include.
        stride: 1 to ``window``.
        batch_size: windows in one pass.
    """
    height, width = x_CHW.shape[-2:]
    x_CHW = F.pad(x_CHW, (0, max(0, window - width), 0, max(0, window - height)))
    tall, wide = x_CHW.shape[-2:]
    places = [
        (top, left)
        for top in window_starts(tall, window, stride)
        for left in window_starts(wide, window, stride)
    ]
    total, seen_HW = torch.empty(0), x_CHW.new_zeros(tall, wide, dtype=torch.float32)
    for b in range(0, len(places), batch_size):
        here = places[b : b + batch_size]
        cut = torch.stack(
            [x_CHW[:, top : top + window, left : left + window] for top, left in here]
        )
        probability_BKHW = network(cut).float().softmax(dim=1)
        if not len(total):
            total = probability_BKHW.new_zeros(probability_BKHW.shape[1], tall, wide)
        for (top, left), probability_KHW in zip(here, probability_BKHW, strict=True):
            total[:, top : top + window, left : left + window] += probability_KHW
            seen_HW[top : top + window, left : left + window] += 1
    return (total / seen_HW)[:, :height, :width]


def likeliest(probability_KHW: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the most likely class of each pixel after bilinear resizing to (height, width), int64,
    a few classes at a time.
    """
    best, number = torch.empty(0), torch.empty(0)
    for k in range(0, len(probability_KHW), _CLASSES_AT_ONCE):
        some = probability_KHW[None, k : k + _CLASSES_AT_ONCE]
        if tuple(some.shape[-2:]) != size:
            some = F.interpolate(some, size=size, mode="bilinear", align_corners=False)
        value, which = some[0].max(dim=0)
        if k == 0:
            best, number = value, which
        else:
            better = value > best
            best, number = torch.where(better, value, best), torch.where(better, which + k, number)
    return number
