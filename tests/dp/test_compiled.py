"""Compiled blocks give the clipped sum of the blocks as they are, and only where they may."""

import copy
import pickle

import pytest
import timm
import torch
import zoo
from torch import nn
from zoo import KEY, class_losses, make_batch, rows

from dpvision.dp import compiled
from dpvision.dp.clip import clipped_sum
from dpvision.dp.compiled import compile_blocks
from dpvision.dp.support import check_compiled
from dpvision.dp.weight_grads import Slot
from dpvision.errors import ConfigError, PrivacyError

NUM = 4


def flat(total):
    return torch.cat([total.grads[name].double().flatten() for name in sorted(total.grads)])


def vit() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return timm.create_model(
            "vit_tiny_patch16_224",
            num_classes=5,
            img_size=32,
            patch_size=8,
            depth=3,
            embed_dim=24,
            num_heads=2,
        )


@pytest.mark.parametrize("name", ["mae", pytest.param("vit", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "num", [NUM, *(pytest.param(few, marks=pytest.mark.slow) for few in (1, 3))]
)
def test_compiled_sum_is_that_of_vmap(name, num):
    model, loss_fn = (zoo.tiny_mae(), zoo.mae_losses) if name == "mae" else (vit(), class_losses)
    model, batch = (
        model.double(),
        make_batch(num, size=8 if name == "mae" else 32, dtype=torch.float64),
    )
    blocks = compile_blocks(model, NUM, backend="aot_eager")
    expected = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=0.1, method="vmap")
    for _ in range(2):  # the call that compiles, and one that finds the program
        total = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=0.1, blocks=blocks)
        assert (flat(total) - flat(expected)).norm() <= 1e-12 * 0.1 * num
        torch.testing.assert_close(total.norms_B, expected.norms_B)
    made = list(blocks.programs.values())
    assert (made and all(made)) if num == NUM else not made, (
        "blocks were not compiled, or for another batch size"
    )


@pytest.mark.slow
def test_blocks_that_differ_in_a_constant_do_not_share_a_program():
    model = vit().double()
    model.blocks[1].norm1.eps = 0.5
    model.blocks[2].norm2.eps = 0.25
    blocks = compile_blocks(model, NUM, backend="aot_eager")
    batch = make_batch(NUM, size=32, dtype=torch.float64)
    expected = clipped_sum(class_losses, model, batch, KEY, max_grad_norm=0.1, method="vmap")
    assert (
        flat(clipped_sum(class_losses, model, batch, KEY, max_grad_norm=0.1, blocks=blocks))
        - flat(expected)
    ).norm() <= 1e-13
    assert len({id(program.run) for program in blocks.programs.values()}) == 3


@pytest.mark.slow
def test_frozen_and_later_thawed_parts_of_a_block():
    model = vit().double()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].mlp.fc1.bias.requires_grad_(False)
    blocks = compile_blocks(model, NUM, backend="aot_eager")
    batch = make_batch(NUM, size=32, dtype=torch.float64)
    for _ in range(2):
        expected = clipped_sum(class_losses, model, batch, KEY, max_grad_norm=0.1, method="vmap")
        total = clipped_sum(class_losses, model, batch, KEY, max_grad_norm=0.1, blocks=blocks)
        assert total.grads.keys() == expected.grads.keys()
        assert (flat(total) - flat(expected)).norm() <= 1e-13
        model.requires_grad_(True)


def test_record_that_is_not_finite_contributes_zero_in_compiled_blocks():
    model, batch = vit(), make_batch(NUM, size=32)
    blocks = compile_blocks(model, NUM, backend="aot_eager")
    image = batch.image_BVCHW.clone()
    image[1, 0, 0, 0, 0] = torch.nan
    total = clipped_sum(
        class_losses,
        model,
        batch._replace(image_BVCHW=image),
        KEY,
        max_grad_norm=0.1,
        blocks=blocks,
    )
    expected = clipped_sum(
        class_losses, model, rows(batch, [0, 2, 3]), KEY, max_grad_norm=0.1, blocks=blocks
    )
    assert (flat(total) - flat(expected)).norm() <= 1e-6 and not total.norms_B[1].isfinite()


def test_block_with_a_computed_weight_runs_as_it_is():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = timm.create_model(
            "convnext_atto", num_classes=5, depths=(1, 1, 2, 1), dims=(8, 8, 8, 8)
        ).double()
    blocks = compile_blocks(model, NUM, backend="aot_eager")
    batch = make_batch(NUM, size=32, dtype=torch.float64)
    expected = clipped_sum(class_losses, model, batch, KEY, max_grad_norm=0.1, method="vmap")
    assert (
        flat(clipped_sum(class_losses, model, batch, KEY, max_grad_norm=0.1, blocks=blocks))
        - flat(expected)
    ).norm() <= 1e-13
    assert None in blocks.programs.values()


class Turned(nn.Module):
    """A block that uses a square matrix transposed: same shape, another gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.weight = nn.Parameter(
            torch.randn(12, 12, generator=torch.Generator().manual_seed(4)) / 3
        )

    def forward(self, x):
        return x + torch.tanh(self.norm(x) @ self.weight.t())


def test_block_with_a_transposed_square_weight_is_exact():
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(192, 12), nn.Sequential(Turned(), Turned()), nn.Linear(12, 5)
    ).double()
    blocks = compile_blocks(model, NUM, backend="aot_eager")
    batch = make_batch(NUM, dtype=torch.float64)
    expected = clipped_sum(class_losses, model, batch, KEY, max_grad_norm=0.1, method="vmap")
    assert (
        flat(clipped_sum(class_losses, model, batch, KEY, max_grad_norm=0.1, blocks=blocks))
        - flat(expected)
    ).norm() <= 1e-13


@pytest.mark.slow
def test_pass_that_broke_off_leaves_nothing_for_the_next(monkeypatch):
    model, batch = vit().double(), make_batch(NUM, size=32, dtype=torch.float64)
    blocks = compile_blocks(model, NUM, backend="aot_eager")
    expected = clipped_sum(class_losses, model, batch, KEY, max_grad_norm=0.1, blocks=blocks)
    add_outer_products, count = Slot.add_outer_products, iter(range(100))

    def broken(self, outer):
        if next(count) == 8:
            raise MemoryError
        add_outer_products(self, outer)

    with monkeypatch.context() as patch:
        patch.setattr(Slot, "add_outer_products", broken)
        with pytest.raises(MemoryError):
            clipped_sum(class_losses, model, batch, KEY, max_grad_norm=0.1, blocks=blocks)
    again = clipped_sum(class_losses, model, batch, KEY, max_grad_norm=0.1, blocks=blocks)
    assert torch.equal(flat(again), flat(expected))


@pytest.mark.slow
def test_model_is_left_as_it_was(monkeypatch):
    """After a pass, and after one that broke off: it can be copied and pickled, and nothing of the
    programs is in it.
    """
    model, batch = vit(), make_batch(NUM, size=32)
    before = [set(vars(part)) for part in model.modules()]
    blocks = compile_blocks(model, NUM, backend="aot_eager")
    clipped_sum(class_losses, model, batch, KEY, max_grad_norm=0.1, blocks=blocks)
    assert blocks.programs and [set(vars(part)) for part in model.modules()] == before

    def broken(*args):
        raise MemoryError

    monkeypatch.setattr(compiled.CompiledBlocks, "_compile", broken)
    blocks = compile_blocks(model, NUM, backend="aot_eager")
    with pytest.raises(MemoryError):
        clipped_sum(class_losses, model, batch, KEY, max_grad_norm=0.1, blocks=blocks)
    assert [set(vars(part)) for part in model.modules()] == before
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(copied(batch.image_BVCHW[:, 0]), model(batch.image_BVCHW[:, 0]))


def test_compiled_blocks_are_compared_with_vmap_before_a_run(monkeypatch):
    model, batch = vit(), make_batch(NUM, size=32)
    blocks = compile_blocks(model, NUM, backend="aot_eager")
    check_compiled(class_losses, model, batch, KEY, blocks)
    settle = compiled.Pending.settle
    monkeypatch.setattr(
        compiled.Pending,
        "settle",
        lambda self, grads: settle(self, (*grads[:-1], grads[-1] * 1.01)),
    )
    with pytest.raises(PrivacyError, match=r"hardware\.compile off"):
        check_compiled(class_losses, model, batch, KEY, blocks)


def test_model_without_repeated_blocks_is_refused():
    with pytest.raises(ConfigError, match="no repeated blocks"):
        compile_blocks(zoo.Bare(), NUM)


@pytest.mark.slow
def test_inductor_gives_the_same():
    model, batch = zoo.tiny_mae(), make_batch(NUM)
    blocks = compile_blocks(model, NUM)
    expected = clipped_sum(zoo.mae_losses, model, batch, KEY, max_grad_norm=0.1, method="vmap")
    total = clipped_sum(zoo.mae_losses, model, batch, KEY, max_grad_norm=0.1, blocks=blocks)
    assert (flat(total) - flat(expected)).norm() <= 1e-5 * flat(expected).norm()
    assert blocks.programs and all(blocks.programs.values())
