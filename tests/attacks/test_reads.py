"""Attacks by what Python learns of the records: a number, a size, a text or an exception, after
which one record decides what all others give. And by passes that make the calls that were followed
on other tensors.

Each moved the sum by 4 C or more before ``dp.record_reads``, ``dp.batch_dims.Sources`` and the
repeated checks; one of class 9 among eleven of class 0 decides.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpvision import clipped_sum
from dpvision.data.keys import StepKey
from dpvision.dp.clip import ClippedSum
from dpvision.errors import PrivacyError

NUM, WIDTH, CLASSES = 12, 6, 3


class Records(NamedTuple):
    record_id_B: Tensor
    valid_B: Tensor
    x_BD: Tensor
    label_B: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.gate = nn.Parameter(torch.tensor(0.5))


def records(first_label: int = 9) -> Records:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM, WIDTH, generator=generator)
    label = torch.zeros(NUM, dtype=torch.long)
    x[0], label[0] = 50 * x[0], first_label
    return Records(torch.arange(1, NUM + 1), torch.ones(NUM, dtype=torch.bool), x, label)


def summed(loss: Any, model: nn.Module, batch: Any, **settings: Any) -> ClippedSum:
    return clipped_sum(loss, model, batch, StepKey(0, 0), max_grad_norm=1.0, rows=16, **settings)


def moved(loss: Any, model: nn.Module, **settings: Any) -> float:
    """By how much the first record moves the sum, in C."""
    batch = records()
    rest = Records(*(value[1:] for value in batch))
    a, b = (summed(loss, model, part, **settings).grads for part in (batch, rest))
    return float(sum((a[n].double() - b[n].double()).square().sum() for n in a) ** 0.5)


@torch.jit.script
def scripted(label_B: Tensor) -> Tensor:
    return (label_B == 9).float().sum()


def replaced(label_B: Tensor) -> Tensor:
    value = torch.zeros(())
    value.data = label_B.eq(9).float().sum()
    return value


def _told(label_B: Tensor) -> list[int]:
    found: list[int] = []
    label_B.clone().apply_(lambda value: found.append(value) or value)
    return [value for value in found if value == 9]


READ: dict[str, Callable[[Tensor], Any]] = {
    "where": lambda label: len(torch.where(label == 9)[0]),
    "argwhere": lambda label: len(torch.argwhere(label == 9)),
    "unique": lambda label: len(torch.unique_consecutive(label == 9)) - 1,
    "one_hot": lambda label: F.one_hot(label).shape[1] > 8,
    "bincount": lambda label: len(torch.bincount(label)) > 8,
    "a size": lambda label: len(torch.zeros(label.amax())) > 8,
    "arange": lambda label: len(torch.arange(label.amax())) > 8,
    "repeats": lambda label: len(torch.ones(1).repeat_interleave(label[:1].clamp(0, 9))) > 8,
    "split": lambda label: len(torch.tensor_split(torch.ones(9), label[:1])[0]) > 8,
    "sparse": lambda label: label.eq(9).long().to_sparse()._nnz(),
    "format": lambda label: "9" in f"{label.max()}",
    "repr": lambda label: "9" in repr(label),
    "str": lambda label: "9" in str(label.amax()),
    "copy": lambda label: bool((copy.deepcopy(label) == 9).any()),
    "apply": lambda label: bool(_told(label)),
    "script": scripted,
    "data": replaced,
}


@pytest.mark.parametrize("how", READ)
def test_python_reads_no_record(how: str) -> None:
    def loss(model: Any, batch: Records, key: StepKey) -> Tensor:
        out = model.head(torch.tanh(model.layer(batch.x_BD)))
        few = F.cross_entropy(out, batch.label_B.clamp(max=2), reduction="none")
        return few + READ[how](batch.label_B) * out[:, 0] ** 2 * 5

    with pytest.raises(PrivacyError):
        moved(loss, Model())


def test_no_text_of_records_is_written_under_vmap() -> None:
    def loss(model: Any, batch: Records, key: StepKey) -> Tensor:
        out = model.head(model.layer(batch.x_BD))
        sign = -1.0 if "9" in repr(batch.label_B) else 1.0
        return F.cross_entropy(out, batch.label_B.clamp(max=2), reduction="none") * sign

    with pytest.raises((PrivacyError, RuntimeError)):
        moved(loss, Model(), method="vmap")


@pytest.mark.parametrize("method", ["one_pass", "vmap"])
def test_no_exception_is_caught(method: str) -> None:
    """A record of class 9 makes the call raise for all."""

    def loss(model: Any, batch: Records, key: StepKey) -> Tensor:
        out = model.head(model.layer(batch.x_BD))
        label_B, sign = batch.label_B.clamp(max=2), 1.0
        try:
            torch.linalg.inv(torch.diag_embed((batch.label_B != 9).double()[:, None]))
        except RuntimeError:
            sign = -1.0
        return F.cross_entropy(out, label_B, reduction="none") * sign

    with pytest.raises(PrivacyError, match="caught the exception"):
        moved(loss, Model(), method=method)


def centred(model: Any, batch: Records, key: StepKey) -> Tensor:
    h_BD = model.layer(batch.x_BD)
    low_BD = h_BD - h_BD.mean(0)
    used_BD = low_BD if float(model.gate) > 1 else h_BD
    return F.cross_entropy(model.head(used_BD), batch.label_B, reduction="none") * 3


def returned(model: Any, batch: Records, key: StepKey) -> Tensor:
    out_BK = model.head(model.layer(batch.x_BD))
    loss_B = F.cross_entropy(out_BK, batch.label_B, reduction="none")
    other_B = loss_B + (out_BK - out_BK.mean(0)).square().sum(1) * 2
    return other_B if float(model.gate) > 1 else loss_B


def shifted(model: Any, batch: Records, key: StepKey) -> Tensor:
    h_BD = model.layer(batch.x_BD)
    mean_D = h_BD.detach().mean(0)
    shift_D = mean_D if float(model.gate) > 1 else torch.zeros_like(mean_D)
    return F.cross_entropy(model.head(h_BD - shift_D), batch.label_B, reduction="none") * 3


def reshaped(model: Any, batch: Records, key: StepKey) -> Tensor:
    """Another call than at first, which is followed again."""
    h_BD = model.layer(batch.x_BD)
    if float(model.gate) > 1:
        h_BD = h_BD.view(WIDTH, -1).T.contiguous().view(h_BD.shape)
    return F.cross_entropy(model.head(h_BD), batch.label_B, reduction="none") * 3


def written(model: Any, batch: Records, key: StepKey) -> Tensor:
    """A call that returns none: it is one of those to repeat too."""
    h_BD = model.layer(batch.x_BD)
    shift_D = torch.zeros(WIDTH, dtype=h_BD.dtype)
    mean_D = h_BD.detach().mean(0)
    if float(model.gate) > 1:
        shift_D[:] = mean_D
    return F.cross_entropy(model.head(h_BD - shift_D), batch.label_B, reduction="none") * 3


def by_columns(model: Any, batch: Records, key: StepKey) -> Tensor:
    """Two shapes of one tensor, of which a weight takes one."""
    h_BD = model.layer(batch.x_BD)
    turned_DB = h_BD.reshape(WIDTH, -1)
    used = turned_DB if float(model.gate) > 1 else h_BD
    probability_BD = used.softmax(1).reshape(h_BD.shape)
    return F.cross_entropy(model.head(probability_BD), batch.label_B, reduction="none") * 3


@pytest.mark.parametrize("loss", [centred, returned, shifted, reshaped, written, by_columns])
def test_a_weight_that_passes_one_chooses_no_tensor_unseen(loss: Any) -> None:
    model, batch = Model(), records(0)
    summed(loss, model, batch)
    with torch.no_grad():
        model.gate.fill_(1.5)
    with pytest.raises(PrivacyError):
        summed(loss, model, batch)


def test_honest_reads_are_accepted() -> None:
    """One hot codes of a given number of classes, a number of a weight, the same tensors again."""

    def loss(model: Any, batch: Records, key: StepKey) -> Tensor:
        out_BK = model.head(torch.tanh(model.layer(batch.x_BD.contiguous())))
        target_BK = F.one_hot(batch.label_B.clamp(max=2), CLASSES).to(out_BK)
        scale = max(1.0, float(model.gate))
        return F.cross_entropy(out_BK, target_BK, reduction="none") * scale

    model = Model()
    assert 0.5 < moved(loss, model) <= 1
    with torch.no_grad():
        model.gate.fill_(1.5)
    assert 0.5 < moved(loss, model) <= 1
