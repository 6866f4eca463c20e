"""Mistakes with what is in the norm: planted, and caught. The ids are those of docs/pitfalls.md, section "Clipping"."""

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import zoo
from per_record_loop import clipped_sum_loop
from torch import Tensor, nn
from zoo import KEY, GradientIsPicture, class_losses, make_batch, picture_losses, rows

from dpvision.config import HardwareConfig, RunConfig, from_dict
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.data.loader import physical_batches
from dpvision.data.store import Store
from dpvision.dp import clip
from dpvision.dp.clip import ClippedSum, clipped_sum
from dpvision.dp.support import check_separable
from dpvision.train.objectives import mae_losses

from .planting import assert_refused, caught, planted

C = 0.1
ClippedSumFn = Callable[..., ClippedSum]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return build()


def flat(grads: dict[str, Tensor]) -> Tensor:
    return torch.cat([grads[name].double().flatten() for name in sorted(grads)])


def check_clip(clipped_sum: ClippedSumFn, model: nn.Module, loss_fn: Any, batch: Batch) -> None:
    """The contract: every record moves the sum by at most C, and the sum is that of the slow loop over records."""
    total = flat(clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=C).grads)
    num = len(batch.record_id_B)
    for j in range(num):
        others = rows(batch, [i for i in range(num) if i != j])
        moved = total - flat(clipped_sum(loss_fn, model, others, KEY, max_grad_norm=C).grads)
        assert moved.norm() <= C * (1 + 1e-5), "a record moves the sum by more than the clip norm"
    expected, norms, _ = clipped_sum_loop(loss_fn, model, batch, KEY, C)
    assert max(norms) > C, "nothing to clip"
    assert (total - flat(expected)).norm() <= 1e-4 * C * num, "the sum is not that of the clipped gradients"


MORE, OTHER = "moves the sum by more than the clip norm", "not that of the clipped gradients"


def norm_without(leave_out: Callable[[str, Tensor], bool]) -> Callable[[dict[str, Tensor]], Tensor]:
    """``clip._norms`` that overlooks some parameters; a gradient's first dimension is the record."""
    norms = clip._norms
    return lambda grads: norms({name: value for name, value in grads.items() if not leave_out(name, value)})


def clip_each_use(unshared: nn.Module, shared: dict[str, str]) -> ClippedSumFn:
    """Clipping that takes the norm of every use of a tensor by itself, as hooks on layers do.

    Args:
        unshared: the model with a parameter of its own for every use.
        shared: the name of a use -> the name of the parameter.
    """

    def mutant(loss_fn, model, batch, key, *, max_grad_norm):
        params = {name: p.detach() for name, p in unshared.named_parameters()}
        grads, losses_B = clip.per_record_gradients(loss_fn, unshared, params, batch, key)
        norms_B = clip._norms(grads)
        factor_B = (max_grad_norm / norms_B).clamp(max=1).float()
        total = ClippedSum.zeros(model).grads
        for name, value in grads.items():
            total[shared.get(name, name)] += torch.tensordot(factor_B, value, dims=1)
        return ClippedSum(total, len(losses_B), norms_B.float(), losses_B)

    return mutant


def test_bare_parameter_unclipped() -> None:
    def check() -> None:
        check_clip(clipped_sum, seeded(zoo.Bare), class_losses, make_batch(4))

    check()
    with planted(clip, "_norms", norm_without(lambda name, _: "." not in name), MORE):
        check()


def test_bias_or_layernorm_unclipped() -> None:
    def check() -> None:
        check_clip(clipped_sum, zoo.tiny_mae(), zoo.mae_losses, make_batch(4))

    check()
    with planted(clip, "_norms", norm_without(lambda name, _: name.endswith("bias")), MORE):
        check()
    with planted(clip, "_norms", norm_without(lambda name, value: value.ndim == 2), MORE):  # vectors: LayerNorms, too
        check()


def test_tied_parameter_unclipped() -> None:
    model = seeded(zoo.Tied)
    untied = copy.deepcopy(model)
    untied.up.weight = nn.Parameter(model.down.weight.detach().clone())
    check_clip(clipped_sum, model, class_losses, make_batch(4))
    with caught(MORE):
        check_clip(clip_each_use(untied, {"up.weight": "down.weight"}), model, class_losses, make_batch(4))


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


def test_reused_layer_unclipped() -> None:
    model = seeded(zoo.Reused)
    shared = {f"calls.{i}.{name}": f"step.{name}" for i in range(3) for name in ("weight", "bias")}
    check_clip(clipped_sum, model, class_losses, make_batch(4))
    with caught(MORE):
        check_clip(clip_each_use(Unrolled(model), shared), model, class_losses, make_batch(4))


def test_thawed_parameter_unclipped() -> None:
    def check() -> None:
        model = seeded(zoo.Frozen)
        clipped_sum(class_losses, model, make_batch(4), KEY, max_grad_norm=C)
        model.body[0].bias.requires_grad_(True)
        check_clip(clipped_sum, model, class_losses, make_batch(4))

    def remembered() -> Callable[[dict[str, Tensor]], Tensor]:
        """Norms over the parameters of the first call."""
        names: set[str] = set()

        def norms(grads):
            names.update(names or grads)
            return real({name: value for name, value in grads.items() if name in names})

        return norms

    real = clip._norms
    check()
    with planted(clip, "_norms", remembered(), MORE):
        check()


def test_loss_averaged_before_clip() -> None:
    """A clip of the batch's mean gradient breaks the contract; a loss that is a mean does not pass the gate."""

    def mean_first(loss_fn, model, batch, key, *, max_grad_norm):
        total = clipped_sum(loss_fn, model, batch, key, max_grad_norm=None)
        factor = min(1.0, max_grad_norm * total.num_records / flat(total.grads).norm().item())
        return ClippedSum({name: factor * value for name, value in total.grads.items()}, total.num_records, total.norms_B, total.losses_B)

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
        check_separable(lambda *args: mean_losses(*args).expand_as(args[1].record_id_B), model, make_batch(4), KEY)


def test_views_clipped_separately() -> None:
    """With the product's own loss of several views."""

    def view_by_view(loss_fn, model, batch, key, *, max_grad_norm):
        views = [batch._replace(image_BVCHW=batch.image_BVCHW[:, v : v + 1]) for v in range(batch.image_BVCHW.shape[1])]
        return sum(
            (clipped_sum(loss_fn, model, view, key, max_grad_norm=max_grad_norm) for view in views[1:]),
            start=clipped_sum(loss_fn, model, views[0], key, max_grad_norm=max_grad_norm),
        )

    check_clip(clipped_sum, zoo.tiny_mae(), mae_losses, make_batch(3, views=3))
    with caught(MORE):
        check_clip(view_by_view, zoo.tiny_mae(), mae_losses, make_batch(3, views=3))


def test_padding_counted() -> None:
    def check(clipped_sum: ClippedSumFn) -> None:
        model, batch, valid = seeded(zoo.Bare), make_batch(5), torch.tensor([True, False, True, True, False])
        padded = clipped_sum(class_losses, model, batch._replace(valid_B=valid), KEY, max_grad_norm=C)
        without = clipped_sum(class_losses, model, rows(batch, valid), KEY, max_grad_norm=C)
        assert torch.equal(flat(padded.grads), flat(without.grads)), "padding is in the sum"
        assert padded.num_records == 3 == len(padded.losses_B), "padding is counted"

    def all_valid(loss_fn, model, batch, key, *, max_grad_norm):
        return clipped_sum(loss_fn, model, batch._replace(valid_B=torch.ones_like(batch.valid_B)), key, max_grad_norm=max_grad_norm)

    def counted(loss_fn, model, batch, key, *, max_grad_norm):
        return replace(clipped_sum(loss_fn, model, batch, key, max_grad_norm=max_grad_norm), num_records=len(batch.valid_B))

    check(clipped_sum)
    with caught("padding is in the sum"):
        check(all_valid)
    with caught("padding is counted"):
        check(counted)


def test_mask_keyed_by_row(scenes: Store, config: RunConfig) -> None:
    """Masks, which the model draws, by the gate; crops and flips, which the loader draws, by leaving out a record."""

    def check_masks() -> None:
        check_separable(mae_losses, zoo.tiny_mae(), make_batch(4), KEY)

    def check_crops() -> None:
        def pictures(chosen: list[int]) -> dict[int, Tensor]:
            batches = physical_batches(scenes, np.array(chosen), KEY, config.data, 16, physical_batch_size=8, workers=1)
            return {int(i): x for batch in batches for i, x in zip(batch.record_id_B, batch.image_BVCHW, strict=True)}

        whole, fewer = pictures([0, 1, 2, 3]), pictures([1, 2, 3])
        assert all(torch.equal(whole[i], x) for i, x in fewer.items()), "one record less, and the others get other crops"

    def bits_by_row(key, record_id_B, stream, count):
        return bits(key, torch.arange(len(record_id_B)), stream, count)

    def uniform_by_row(key, record_id_B, stream, count):
        return uniform(key, np.arange(len(record_id_B)), stream, count)

    bits, uniform = StepKey.bits, StepKey.uniform_numpy
    check_masks()
    with planted(StepKey, "bits", bits_by_row, "depends on its row in the batch"):
        check_masks()
    check_crops()
    with planted(StepKey, "uniform_numpy", uniform_by_row, "others get other crops"):
        check_crops()


def with_bad_record(bad: float) -> Batch:
    """Four records, the third of which has one number ``bad``."""
    batch = make_batch(4)
    batch.image_BVCHW[2, 0, 1, 3, 3] = bad
    return batch


def check_bad_record(clipped_sum: ClippedSumFn, bad: float) -> None:
    model = GradientIsPicture(3, 8, 8)
    good = rows(make_batch(4), [0, 1, 3])
    before = clipped_sum(picture_losses, model, good, KEY, max_grad_norm=C).grads["weight"]
    mixed = clipped_sum(picture_losses, model, with_bad_record(bad), KEY, max_grad_norm=C).grads["weight"]
    assert mixed.isfinite().all(), "one record spoils the whole sum"
    assert mixed.any(), "one record takes the others out of the step"
    torch.testing.assert_close(mixed, before, rtol=1e-5, atol=1e-8, msg="a bad record does not contribute exactly zero")
    after = clipped_sum(picture_losses, model, good, KEY, max_grad_norm=C).grads["weight"]
    assert torch.equal(after, before), "one record changes later sums"


def test_nonfinite_record_poisons() -> None:
    def check() -> None:
        for bad in (torch.nan, torch.inf, 1e30):
            check_bad_record(clipped_sum, bad)

    check()
    with planted(torch.Tensor, "masked_fill_", lambda self, mask, value: self, "spoils the whole sum"):  # a factor of zero only
        check()


def assert_no_loss_scale() -> None:
    """Half precision, which needs a loss scale, cannot be asked for, and there is nothing to set one by."""
    assert_refused(lambda: from_dict(HardwareConfig, {"precision": "float16"}), "precision float16")
    assert not [field.name for field in dataclasses.fields(HardwareConfig) if "scale" in field.name]


def test_loss_scale_in_norm() -> None:
    assert_no_loss_scale()

    def scaled(loss_fn, model, batch, key, *, max_grad_norm):
        total = clipped_sum(lambda *args: 1024 * loss_fn(*args), model, batch, key, max_grad_norm=max_grad_norm)
        return replace(total, grads={name: value / 1024 for name, value in total.grads.items()})

    check_clip(clipped_sum, seeded(zoo.Bare), class_losses, make_batch(4))
    with caught(OTHER):
        check_clip(scaled, seeded(zoo.Bare), class_losses, make_batch(4))


def test_loss_scale_private_overflow() -> None:
    """Against a scaler as in mixed-precision training: a step with an overflow is left out, and the scale is halved for later ones."""
    assert_no_loss_scale()

    def skipping(loss_fn, model, batch, key, *, max_grad_norm):
        total = clipped_sum(loss_fn, model, batch, key, max_grad_norm=max_grad_norm)
        return total if total.norms_B.isfinite().all() else ClippedSum.zeros(model)

    class Halving:
        scale = 1.0

        def __call__(self, loss_fn, model, batch, key, *, max_grad_norm):
            total = clipped_sum(lambda *args: self.scale * loss_fn(*args), model, batch, key, max_grad_norm=max_grad_norm * self.scale)
            grads = {name: value / self.scale for name, value in total.grads.items()}
            if not total.norms_B.isfinite().all():
                self.scale *= 0.3  # a power of two would hide it: such a scale only moves the exponent
            return replace(total, grads=grads)

    check_bad_record(clipped_sum, torch.nan)
    with caught("takes the others out of the step"):
        check_bad_record(skipping, torch.nan)
    with caught("changes later sums"):
        check_bad_record(Halving(), torch.nan)


def test_half_precision_norm() -> None:
    """Gradients that lie just above the clip norm, or far above, in several shapes; measured in float64, without slack."""

    def check() -> None:
        generator = torch.Generator().manual_seed(3)
        for shape in ((1, 1, 7), (3, 33, 41), (3, 128, 128)):
            model = GradientIsPicture(*shape)
            for scale in (1.001, 3.0, 1e3, 1e7):
                image = torch.randn(1, 1, *shape, generator=generator)
                image *= C * scale / image.norm()
                total = clipped_sum(picture_losses, model, make_batch(1)._replace(image_BVCHW=image), KEY, max_grad_norm=C)
                norm = total.grads["weight"].double().norm()
                assert norm <= C, "a contribution is longer than the clip norm"
                assert norm >= C * (1 - 1e-5), "a contribution is cut shorter than the clip norm"

    def norms_in(dtype):
        return lambda grads: sum(value.to(dtype).square().flatten(1).sum(1) for value in grads.values()).sqrt().double()

    check()
    for dtype in (torch.bfloat16, torch.float16):
        with planted(clip, "_norms", norms_in(dtype), "a contribution is"):
            check()
