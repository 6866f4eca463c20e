"""How a mistake is planted and what counts as catching it.

Every test of this folder has the same shape: a check passes on the code as it is; the mistake is
planted in place of one name; the same check must now fail, by its own assertion or by an error of
the product's, with the expected words. An error of another kind (a TypeError of a badly written
mutant, say) is not a catch.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from per_record_loop import clipped_sum_loop, flat, usable
from torch import nn
from zoo import KEY, rows

from dpvision.data.batch import Batch
from dpvision.dp.clip import ClippedSum
from dpvision.dp.rounding import LOOSE
from dpvision.errors import DPVisionError

CAUGHT = (AssertionError, DPVisionError)
CATCHES: list[str] = []
"""What caught each mistake of the running test, for the table of docs/audits.md."""


@contextlib.contextmanager
def caught(match: str) -> Iterator[None]:
    """The block must fail with words that ``match``."""
    with pytest.raises(CAUGHT, match=match) as caught_by:
        yield
    CATCHES.append(caught_by.typename)


@contextlib.contextmanager
def planted(target: Any, name: str, mistake: Any, match: str) -> Iterator[None]:
    """``target.name`` is ``mistake`` within the block, which must then fail with words that
    ``match``.
    """
    with pytest.MonkeyPatch.context() as patch, caught(match):
        patch.setattr(target, name, mistake)
        yield


def assert_refused(action: Callable[[], object], what: str) -> None:
    """``action`` must end in an error of the product's."""
    try:
        action()
    except DPVisionError:
        return
    raise AssertionError(f"{what} was accepted")


C = 0.1
ClippedSumFn = Callable[..., ClippedSum]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return build()


def check_clip(clipped_sum: ClippedSumFn, model: nn.Module, loss_fn: Any, batch: Batch) -> None:
    """The contract: every record moves the sum by at most C, and the sum is that of the slow loop
    over records.
    """
    total = flat(clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=C).grads)
    num = len(batch.record_id_B)
    for j in range(num):
        others = rows(batch, [i for i in range(num) if i != j])
        moved = total - flat(clipped_sum(loss_fn, model, others, KEY, max_grad_norm=C).grads)
        assert moved.norm() <= usable(model, C) * (1 + LOOSE), (
            "a record moves the sum by more than the clip norm"
        )
    expected, norms, _ = clipped_sum_loop(loss_fn, model, batch, KEY, C)
    assert max(norms) > C, "nothing to clip"
    assert (total - flat(expected)).norm() <= 1e-4 * C * num, (
        "the sum is not that of the clipped gradients"
    )


MORE, OTHER = "moves the sum by more than the clip norm", "not that of the clipped gradients"
