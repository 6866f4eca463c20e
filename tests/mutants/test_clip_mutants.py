"""Mistakes with what is in the norm: planted, and caught. The ids are those of docs/pitfalls.md,
section "Clipping".

Both methods are tried: what a norm leaves out is planted in ``clip.written_norms`` (vmap), and in
``one_pass.total_square_norms`` or ``weight_grads.Slot``.
"""

import contextlib
import copy
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
import zoo_tokens
from made import changed
from per_record_loop import flat
from torch import Tensor, nn
from zoo import KEY, class_losses, make_batch, rows

from dpvision.config import RunConfig
from dpvision.data.batch import HostRows
from dpvision.data.importer import import_samples
from dpvision.data.keys import StepKey
from dpvision.data.loader import physical_batches
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.data.tokenizer import CaptionReader, train_tokenizer
from dpvision.dp import (
    batch_dims,
    clip,
    gram,
    held_values,
    interception,
    one_pass,
    outer_products,
    per_record,
    record_flow,
    route,
    separable,
    weight_grads,
)
from dpvision.dp.clip import ClippedSum, clipped_sum
from dpvision.dp.gram import SquareNorms
from dpvision.dp.separable import check_separable
from dpvision.dp.support import check_exact
from dpvision.dp.weight_grads import Slot
from dpvision.train import own_records
from dpvision.train.objectives import mae_losses

from .planting import (
    MORE,
    OTHER,
    C,
    ClippedSumFn,
    assert_refused,
    caught,
    check_clip,
    planted,
    seeded,
)

LeaveOut = Callable[[str, tuple[int, ...]], bool]
"""(parameter's name, its shape) -> whether a norm overlooks it."""


def planted_norm(method: str, leave_out: Callable[[], LeaveOut], match: str):
    """A norm that overlooks some parameters, planted in one of the two methods; ``leave_out`` is
    made anew for every planting.
    """
    overlooked = leave_out()
    if method == "vmap":
        norms = clip.written_norms
        mutant: Any = (  # noqa: E731
            lambda grads: norms(
                {
                    name: value
                    for name, value in grads.items()
                    if not overlooked(name, value.shape[1:])
                }
            )
        )
        return planted(clip, "written_norms", mutant, match)
    square_norms = one_pass.total_square_norms

    def without(
        groups: list[list[Slot]], params: dict[str, Tensor], num_records: int, device: torch.device
    ) -> SquareNorms:
        kept = [
            g
            for g in groups
            if not all(overlooked(name, params[name].shape) for slot in g for name in slot.names)
        ]
        return square_norms(kept, params, num_records, device)

    return planted(one_pass, "total_square_norms", without, match)


def norms_of_uses(slot: Slot, num_records: int) -> SquareNorms:
    """``Slot.square_norms`` with the squared norm of every use by itself, as hooks on layers have
    it.
    """
    parts = [gram.square_norms([use]) for use in slot.outers]
    if slot.written_BW is not None:
        parts.append(SquareNorms.certain(weight_grads.sum_of_squares(slot.written_BW)))
    return sum(parts[1:], start=parts[0])


def last_use(slot: Slot, use: outer_products.OuterProducts) -> None:
    """``Slot.add_outer_products`` that overwrites the use before."""
    slot.outers = [use]


def clip_each_use(unshared: nn.Module, shared: dict[str, str]) -> ClippedSumFn:
    """Clipping that takes the norm of every use of a tensor by itself, as hooks on layers do.

    Args:
        unshared: the model with a parameter of its own for every use.
        shared: the name of a use -> the name of the parameter.
    """

    def mutant(loss_fn, model, batch, key, *, max_grad_norm):
        params = {name: p.detach() for name, p in unshared.named_parameters()}
        grads, losses_B = per_record.per_record_gradients(loss_fn, unshared, params, batch, key)
        norms_B = clip.written_norms(grads)
        factor_B = (max_grad_norm / norms_B).clamp(max=1).float()
        total = ClippedSum.zeros(model, max_grad_norm).grads
        for name, value in grads.items():
            total[shared.get(name, name)] += torch.tensordot(factor_B, value, dims=1)
        return changed(
            ClippedSum.zeros(model, max_grad_norm),
            grads=total,
            num_records=len(losses_B),
            norms_B=norms_B,
            losses_B=losses_B,
        )

    return mutant


def test_bare_parameter_unclipped(method: str) -> None:
    def check() -> None:
        check_clip(
            partial(clipped_sum, method=method), seeded(zoo.Bare), class_losses, make_batch(4)
        )

    check()
    with planted_norm(method, lambda: lambda name, _: "." not in name, MORE):
        check()


def test_bias_or_layernorm_unclipped(method: str) -> None:
    def check() -> None:
        check_clip(
            partial(clipped_sum, method=method), zoo.tiny_mae(), zoo.mae_losses, make_batch(4)
        )

    check()
    with planted_norm(method, lambda: lambda name, _: name.endswith("bias"), MORE):
        check()
    with planted_norm(
        method, lambda: lambda _, shape: len(shape) == 1, MORE
    ):  # vectors: LayerNorms, too
        check()


def test_tied_parameter_unclipped(method: str) -> None:
    model = seeded(zoo.Tied)
    untied = copy.deepcopy(model)
    untied.up.weight = nn.Parameter(model.down.weight.detach().clone())

    def check() -> None:
        check_clip(partial(clipped_sum, method=method), model, class_losses, make_batch(4))

    check()
    if method == "vmap":
        with caught(MORE):
            check_clip(
                clip_each_use(untied, {"up.weight": "down.weight"}),
                model,
                class_losses,
                make_batch(4),
            )
    else:
        with planted(Slot, "square_norms", norms_of_uses, f"{MORE}|{OTHER}"):
            check()
        with planted(Slot, "add_outer_products", last_use, OTHER):
            check()


class Unrolled(nn.Module):
    """``zoo.Reused`` with a layer of its own for each of the three calls."""

    def __init__(self, reused: nn.Module) -> None:
        super().__init__()
        self.body = reused.body
        self.calls = nn.ModuleList(copy.deepcopy(reused.step) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x.flatten(1))
        for layer in self.calls:
            x = torch.tanh(layer(x))
        return x


def test_reused_layer_unclipped(method: str) -> None:
    model = seeded(zoo.Reused)
    shared = {f"calls.{i}.{name}": f"step.{name}" for i in range(3) for name in ("weight", "bias")}

    def check() -> None:
        check_clip(partial(clipped_sum, method=method), model, class_losses, make_batch(4))

    check()
    if method == "vmap":
        with caught(MORE):
            check_clip(clip_each_use(Unrolled(model), shared), model, class_losses, make_batch(4))
    else:
        with planted(Slot, "square_norms", norms_of_uses, MORE):
            check()
        with planted(Slot, "add_outer_products", last_use, OTHER):
            check()


def test_thawed_parameter_unclipped(method: str) -> None:
    def check() -> None:
        model = seeded(zoo.Frozen)
        clipped_sum(class_losses, model, make_batch(4), KEY, max_grad_norm=C, method=method)
        model.body[0].bias.requires_grad_(True)
        check_clip(partial(clipped_sum, method=method), model, class_losses, make_batch(4))

    def thawed() -> LeaveOut:
        """Norms over the parameters of the first call: the third call asks for the bias for the
        first time.
        """
        return lambda name, _: name == "body.0.bias"

    check()
    with planted_norm(method, thawed, MORE):
        check()


def test_rows_of_another_record() -> None:
    """Two views one after the other in the batch, and tokens before records; by clipping, and by
    the gate of single records.
    """
    members = [
        zoo_tokens.TOKENS[name]
        for name in ("views_one_after_the_other", "tokens_first", "attention_tokens_first")
    ]

    def check_sum(build: Any, loss_fn: Any) -> None:
        check_clip(clipped_sum, seeded(build), loss_fn, make_batch(4))

    def check_gate(build: Any, loss_fn: Any) -> None:
        check_exact(loss_fn, seeded(build), make_batch(4), KEY)

    for check in (check_sum, check_gate):
        for build, loss_fn in members:
            check(build, loss_fn)
            words = (
                f"{MORE}|{OTHER}" if check is check_sum else "differ from those of single records"
            )
            with planted(batch_dims, "_ordered", lambda found, rows: found, words):
                check(build, loss_fn)


def test_loss_averaged_before_clip() -> None:
    """A clip of the batch's mean gradient breaks the contract; a loss that is a mean does not pass
    the gate.
    """

    def mean_first(loss_fn, model, batch, key, *, max_grad_norm):
        total = clipped_sum(loss_fn, model, batch, key, max_grad_norm=None)
        factor = min(1.0, max_grad_norm * total.num_records / flat(total.grads).norm().item())
        return changed(total, grads={name: factor * value for name, value in total.grads.items()})

    def mean_losses(model, batch, key):
        return class_losses(model, batch, key).mean()

    model = seeded(zoo.Bare)
    check_clip(clipped_sum, model, class_losses, make_batch(4))
    with caught(MORE):
        check_clip(mean_first, model, class_losses, make_batch(4))
    check_separable(class_losses, model, make_batch(4), KEY)
    with caught("Do not average over the batch"):
        check_separable(mean_losses, model, make_batch(4), KEY)
    with caught("loss function mixes records"):
        check_separable(
            lambda *args: mean_losses(*args).expand_as(args[1].record_id_B),
            model,
            make_batch(4),
            KEY,
        )


def test_views_clipped_separately() -> None:
    """With the product's own loss of several views."""

    def view_by_view(loss_fn, model, batch, key, *, max_grad_norm):
        views = [
            batch._replace(image_BVCHW=batch.image_BVCHW[:, v : v + 1])
            for v in range(batch.image_BVCHW.shape[1])
        ]
        return sum(
            (
                clipped_sum(loss_fn, model, view, key, max_grad_norm=max_grad_norm)
                for view in views[1:]
            ),
            start=clipped_sum(loss_fn, model, views[0], key, max_grad_norm=max_grad_norm),
        )

    check_clip(clipped_sum, zoo.tiny_mae(), mae_losses, make_batch(3, views=3))
    with caught("a record is twice in a sum"):
        check_clip(view_by_view, zoo.tiny_mae(), mae_losses, make_batch(3, views=3))


def test_padding_counted() -> None:
    def check(clipped_sum: ClippedSumFn) -> None:
        model, batch, valid = (
            seeded(zoo.Bare),
            make_batch(5),
            torch.tensor([True, False, True, True, False]),
        )
        padded = clipped_sum(
            class_losses, model, batch._replace(valid_B=valid), KEY, max_grad_norm=C
        )
        without = clipped_sum(class_losses, model, rows(batch, valid), KEY, max_grad_norm=C)
        assert (flat(padded.grads) - flat(without.grads)).norm() <= 1e-6 * C, (
            "padding is in the sum"
        )
        assert padded.num_records == 3 == len(padded.losses_B), "padding is counted"

    def all_valid(loss_fn, model, batch, key, *, max_grad_norm):
        return clipped_sum(
            loss_fn,
            model,
            batch._replace(valid_B=torch.ones_like(batch.valid_B)),
            key,
            max_grad_norm=max_grad_norm,
        )

    def counted(loss_fn, model, batch, key, *, max_grad_norm):
        return changed(
            clipped_sum(loss_fn, model, batch, key, max_grad_norm=max_grad_norm),
            num_records=len(batch.valid_B),
        )

    check(clipped_sum)
    with caught("padding is in the sum"):
        check(all_valid)
    with caught("padding is counted"):
        check(counted)


def test_checked_by_code_alone() -> None:
    """A term that compares records is absent in the first step; later the loss's code is the
    same. (With the weight 0, a record that is NaN would change the others; and in one pass
    ``record_flow`` would refuse it too.)
    """

    def loss_of(weight: float):
        def losses(model, batch, key):
            losses_B = class_losses(model, batch, key)
            return losses_B + weight * (losses_B - losses_B.mean()) if weight else losses_B

        return losses

    def check() -> None:
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
        step = partial(clipped_sum, max_grad_norm=C, method="vmap")
        step(loss_of(0.0), model, make_batch(4), KEY)
        assert_refused(
            lambda: step(loss_of(1.0), model, make_batch(4), KEY),
            "a term that mixes records",
        )

    check()
    with planted(
        separable,
        "held",
        lambda loss_fn, model: loss_fn.__code__,
        "a term that mixes records was accepted",
    ):
        check()


def test_described_in_part() -> None:
    """The loss reads its weight from a container of which only the class is looked at."""
    weight = deque([0.0])

    def losses(model, batch, key):
        losses_B = class_losses(model, batch, key)
        return losses_B + (losses_B - losses_B.mean()) if weight[0] else losses_B

    def check() -> None:
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
        step = partial(clipped_sum, losses, model, make_batch(4), KEY, max_grad_norm=C)
        weight[0] = 0.0
        step(method="vmap")
        weight[0] = 1.0
        assert_refused(lambda: step(method="vmap"), "a term that mixes records")

    check()
    with planted(
        held_values, "_reduced", lambda value: [], "a term that mixes records was accepted"
    ):
        check()


def test_mask_keyed_by_row(scenes: Store, config: RunConfig, tmp_path: Path) -> None:
    """Masks, which the model draws, by the gate; crops, flips and captions, which the loader draws,
    by leaving out a record.
    """

    def check_masks() -> None:
        check_separable(mae_losses, zoo.tiny_mae(), make_batch(4), KEY)

    def check_crops() -> None:
        def images(chosen: list[int]) -> dict[int, Tensor]:
            batches = physical_batches(
                scenes, np.array(chosen), KEY, config.data, 16, physical_batch_size=8, workers=1
            )
            return {
                int(i): x
                for batch in batches
                for i, x in zip(batch.record_id_B, batch.image_BVCHW, strict=True)
            }

        whole, fewer = images([0, 1, 2, 3]), images([1, 2, 3])
        assert all(torch.equal(whole[i], x) for i, x in fewer.items()), (
            "one record less, and the others get other crops"
        )

    several = [
        Sample(
            f"{i}",
            scenes.read(i),
            {"captions": [f"{word} {i}" for word in ("one", "two", "three", "four")]},
        )
        for i in range(6)
    ]
    told = import_samples(several, tmp_path / "told")
    words = CaptionReader(train_tokenizer(["a scene"] * 9, 259), 12)

    def check_captions() -> None:
        whole, _ = words.read(told, np.arange(6), KEY, 1)
        fewer, _ = words.read(told, np.arange(1, 6), KEY, 1)
        assert np.array_equal(whole[1:], fewer), (
            "one record less, and the others get other captions"
        )

    def bits_by_row(key, record_id_B, stream, count):
        return bits(key, torch.arange(len(record_id_B)), stream, count)

    def uniform_by_row(key, record_id_B, stream, count):
        return uniform(key, np.arange(len(record_id_B)), stream, count)

    bits, uniform = StepKey.bits, StepKey.uniform_numpy
    check_masks()
    with planted(StepKey, "bits", bits_by_row, "depends on its row in the batch"):
        check_masks()
    check_crops()
    check_captions()
    with planted(StepKey, "uniform_numpy", uniform_by_row, "others get other crops"):
        check_crops()
    with planted(StepKey, "uniform_numpy", uniform_by_row, "others get other captions"):
        check_captions()


def check_record_alone(collate_fn: Callable[[list[Any]], Any]) -> None:
    """A record of a user's data set is read as the same tensors whatever is read with it."""

    class Cropped(torch.utils.data.Dataset):
        def __getitem__(self, i: int) -> Tensor:
            return torch.full((4,), float(i)) + torch.rand(4)

        def __len__(self) -> int:
            return 9

    records = own_records._Records(Cropped(), collate_fn)
    many, few = (records[own_records._Job(3, np.array(at), None)] for at in ([2, 5, 7], [5, 7]))
    assert torch.equal(many.values[0][1:], few.values[0]), "another record changes this one"


def test_crop_by_order_of_reading() -> None:
    check_record_alone(torch.stack)
    with planted(own_records, "_set_seeds", lambda number: None, "changes this one"):
        check_record_alone(torch.stack)


def test_collated_together() -> None:
    def mixup(items: list[Tensor]) -> Tensor:
        x = torch.stack(items)
        return 0.5 * x + 0.5 * x.roll(1, 0)

    check_record_alone(mixup)

    def together(records: Any, job: Any) -> Any:
        found = read(records, job)
        return found._replace(values=[mixup(list(found.values[0]))])

    read = own_records._Records.__getitem__
    with planted(own_records._Records, "__getitem__", together, "changes this one"):
        check_record_alone(mixup)


class Sorted(nn.Module):
    """A layer on rows sorted by a label that random records do not have, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(192, 6), nn.Linear(6, 5)

    def forward(self, x_BD: Tensor, key_B: Tensor) -> Tensor:
        order = key_B.argsort(stable=True)
        return self.head(torch.tanh(self.layer(x_BD[order]))[order.argsort()])


def sorted_losses(model: nn.Module, batch: Any, key: StepKey) -> Tensor:
    out = model(batch.image_BVCHW[:, 0].flatten(1), (batch.label_B == 3).long())
    return nn.functional.cross_entropy(out, batch.label_B, reduction="none")


def test_rows_in_another_order() -> None:
    """A way that was found on records of other labels is taken again."""
    batch = make_batch(4)
    batch = batch._replace(
        label_B=torch.tensor([3, 0, 1, 3]),
        image_BVCHW=batch.image_BVCHW * torch.tensor([9.0, 1, 0.1, 1]).view(4, 1, 1, 1, 1),
    )

    def check() -> None:
        model = seeded(Sorted)
        others = batch._replace(label_B=torch.tensor([0, 1, 0, 1]))
        clipped_sum(sorted_losses, model, others, KEY, max_grad_norm=C)
        check_clip(clipped_sum, model, sorted_losses, batch)

    check()
    with planted(route, "follow", lambda *_: route.Level.ROWS, f"{MORE}|{OTHER}"):
        check()


def test_calls_by_name_alone() -> None:
    """A loss takes its softmax over records once a weight has passed 5, in the same calls."""

    def losses(model: nn.Module, batch: Any, key: StepKey) -> Tensor:
        loss_B = class_losses(model, batch, key)
        over = 0 if model[1].bias[0].item() > 5 else 1
        return loss_B * torch.stack([loss_B, loss_B], 1).detach().softmax(over)[:, 0]

    def check() -> None:
        model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 5)))
        step = partial(clipped_sum, losses, model, make_batch(4), KEY, max_grad_norm=C)
        step()
        model[1].bias.data[0] = 6.0
        assert_refused(step, "a softmax over records")

    check()
    with planted(batch_dims, "_setting", lambda value: None, "a softmax over records was accepted"):
        check()


def test_rows_told_by_name_alone() -> None:
    """A mean over neighbours, with a weight that is zero below 5: no function of that name is known
    to join rows.
    """

    def losses(model: nn.Module, batch: Any, key: StepKey) -> Tensor:
        loss_B = class_losses(model, batch, key)
        pixel_B = batch.image_BVCHW[:, 0, 0, 0, 0]
        joined_B = 1e3 * F.avg_pool1d(pixel_B[None, None], 3, 1, 1)[0, 0]
        return torch.where(model[1].bias[0].detach() > 5, loss_B * joined_B, loss_B)

    def check() -> None:
        model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 5)))
        step = partial(clipped_sum, losses, model, key=KEY, max_grad_norm=C)
        batch = make_batch(4)
        batch.image_BVCHW[:, 0, 0, 0, 0] = torch.tensor([1.0, 1.0, 1.0, -1e3])
        step(batch=batch)
        model[1].bias.data[0] = 6.0
        moved = flat(step(batch=batch).grads) - flat(step(batch=rows(batch, slice(0, 3))).grads)
        assert moved.norm() <= C, MORE

    check()
    with planted(record_flow._Flow, "_tried_dims", lambda *args: args[-1], MORE):
        check()


def test_refusal_taken_for_rows() -> None:
    """Quantiles over records, at places that each record gives: the function refuses numbers beyond
    [0, 1], so that normal ones do not try it.
    """

    def losses(model: nn.Module, batch: Any, key: StepKey) -> Tensor:
        loss_B = class_losses(model, batch, key)
        pixel_B = batch.image_BVCHW[:, 0, 0, 0, 0]
        joined_B = 1e3 * (2 + torch.quantile(pixel_B, pixel_B.sigmoid()))
        return torch.where(model[1].bias[0].detach() > 5, loss_B * joined_B, loss_B)

    def check() -> None:
        model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 5)))
        step = partial(clipped_sum, losses, model, key=KEY, max_grad_norm=C)
        batch = make_batch(4)
        batch.image_BVCHW[:, 0, 0, 0, 0] = torch.tensor([-1.0, -1.0, -1.0, -1e3])
        step(batch=batch)
        model[1].bias.data[0] = 6.0
        moved = flat(step(batch=batch).grads) - flat(step(batch=rows(batch, slice(0, 3))).grads)
        assert moved.norm() <= C, MORE

    check()
    tried = record_flow.Trial.dims

    def by_name(call: Any, dims: Any) -> Any:
        return (dims, False) if call.func is torch.quantile else tried(call, dims)

    record_flow._TRIED.clear()  # of what the check before tried
    with planted(record_flow.Trial, "dims", by_name, MORE):
        check()


def test_records_decide_the_flow() -> None:
    def guarded(model: nn.Module, batch: Any, key: StepKey) -> Tensor:
        loss_B = class_losses(model, batch, key)
        return torch.where(loss_B.isfinite().all(), loss_B, torch.zeros_like(loss_B))

    def check(checked: bool) -> None:
        assert_refused(
            lambda: clipped_sum(
                guarded,
                seeded(zoo.Bare),
                make_batch(4),
                KEY,
                max_grad_norm=C,
                check_separability=checked,
            ),
            "a batch that one record skips",
        )

    check(False)
    with planted(route, "follow", lambda *_: route.Level.ROWS, "was accepted"):
        check(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route, "follow", lambda *_: route.Level.ROWS)
        check(True)
        with planted(separable, "_HOSTILE", (), "was accepted"):
            check(True)


class Hooked(nn.Module):
    """Limits the norm of a pass's gradient, as random records do not need."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(192, 6), nn.Linear(6, 5)

    def forward(self, x_BD: Tensor) -> Tensor:
        h = self.layer(x_BD)
        if h.requires_grad:
            h.register_hook(lambda g: g * (6.0 / g.norm()).clamp(max=1.0))
        return 30.0 * self.head(h)


def test_gradients_hooked() -> None:
    batch = make_batch(4)
    batch = batch._replace(label_B=torch.tensor([3, 0, 1, 3]))

    def losses(model: nn.Module, batch: Any, key: StepKey) -> Tensor:
        out = model(batch.image_BVCHW[:, 0].flatten(1))
        return nn.functional.cross_entropy(out, batch.label_B, reduction="none")

    def check() -> None:
        assert_refused(
            lambda: clipped_sum(losses, seeded(Hooked), batch, KEY, max_grad_norm=C),
            "a hook on the gradients of all records",
        )

    check()
    with planted(interception, "refuse_tensor_hook", lambda *_: None, "was accepted"):
        check()


def test_host_rows_of_another_batch() -> None:
    batch = make_batch(4)
    host = HostRows(batch.record_id_B, batch.valid_B)
    padded = batch._replace(
        record_id_B=batch.record_id_B[[0, 1, 1, 1]],
        valid_B=torch.tensor([True, True, False, False]),
    )

    def check() -> None:
        assert_refused(
            lambda: clipped_sum(
                class_losses, seeded(zoo.Bare), padded, KEY, max_grad_norm=C, host=host
            ),
            "padding that counts",
        )

    check()
    with planted(clip, "_host_rows", lambda batch, host: host, "was accepted"):
        check()


class Limited(torch.autograd.Function):
    """Limits the norm of the gradients of all records together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (3 / g.norm()).clamp(max=1.0)


def test_gradients_by_own_code() -> None:
    def losses(model: nn.Module, batch: Any, key: StepKey) -> Tensor:
        out = Limited.apply(model(batch.image_BVCHW[:, 0]))
        return 30.0 * F.cross_entropy(out, batch.label_B, reduction="none")

    def check() -> None:
        assert_refused(
            lambda: clipped_sum(losses, seeded(zoo.Bare), make_batch(4), KEY, max_grad_norm=C),
            "a backward pass over all records",
        )

    check()
    with planted(interception.InterceptedPass, "check_backward", lambda *_: None, "was accepted"):
        check()


@torch.jit.script
def scripted_inverse(matrix: Tensor) -> Tensor:
    return torch.linalg.inv(matrix)


def test_code_unseen() -> None:
    """An exception of a script, which records of one class raise for all."""

    def losses(model: nn.Module, batch: Any, key: StepKey) -> Tensor:
        loss_B = class_losses(model, batch, key)
        try:
            scripted_inverse(torch.diag_embed((batch.label_B < 0).double()[:, None]))
        except RuntimeError:
            return -loss_B
        return loss_B

    def check() -> None:
        assert_refused(
            lambda: clipped_sum(
                losses,
                seeded(zoo.Bare),
                make_batch(4),
                KEY,
                max_grad_norm=C,
                method="vmap",
                check_separability=False,
            ),
            "a script",
        )

    class Blind(contextlib.nullcontext[None]):
        name = ""

    check()
    with planted(per_record, "_Unseen", Blind, "a script was accepted"):
        check()


def test_records_in_a_parameter() -> None:
    def losses(model: nn.Module, batch: Any, key: StepKey) -> Tensor:
        with torch.no_grad():
            model.kept.copy_(batch.image_BVCHW.mean())
        return class_losses(model, batch, key)

    def check() -> None:
        model = seeded(zoo.Bare)
        model.kept = nn.Parameter(torch.zeros(()), requires_grad=False)
        assert_refused(
            lambda: clipped_sum(losses, model, make_batch(4), KEY, max_grad_norm=C),
            "a mean of the records that stays",
        )

    check()
    with planted(clip, "_state", lambda model: None, "was accepted"):
        check()
