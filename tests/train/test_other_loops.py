"""``private_loop`` under other people's trainers and around their models: gradients are those of
single records, and what would train on anything else is refused or changes nothing.

docs/other_loops.md has these attempts as a table.
"""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpvision import PrivacyConfig, private_loop
from dpvision.data.batch import Batch, take
from dpvision.data.keys import StepKey
from dpvision.dp.clip import clipped_sum
from dpvision.dp.held_values import Undescribed, held
from dpvision.dp.rounding import reserve
from dpvision.dp.separable import check_separable, in_float64
from dpvision.errors import ConfigError, PrivacyError
from dpvision.privacy.account import store_account
from dpvision.train.own_loop import PrivateLoop

NUM, STEPS = 60, 4
CONFIG = PrivacyConfig(
    dataset_size=NUM, expected_batch_size=20, steps=STEPS, noise_multiplier=2.0, max_grad_norm=0.5
)
X = torch.randn(NUM, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(NUM) % 3
IMAGES = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))
KEY = StepKey(0, 0)
OUTSIDE = "a backward pass outside the loop reached a trained parameter"


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "private" / "items"


def opened(folder: Path, model: nn.Module, data: Any = None, **more: Any) -> Any:
    return private_loop(
        model, data or TensorDataset(X, Y), loss, CONFIG, folder, physical_batch_size=8, **more
    )


def moved(model: nn.Module) -> bool:
    """Whether the weights are others than at first."""
    return any(
        not torch.equal(a, b) for a, b in zip(model.parameters(), net().parameters(), strict=True)
    )


# Backward passes and steps that are not the loop's


def test_a_backward_pass_of_the_callers_own_is_refused_until_the_block_ends(folder: Path) -> None:
    model = net()
    with opened(folder, model) as loop:
        for step in loop:
            step.backward()
            private = {name: p.grad.clone() for name, p in model.named_parameters()}
            with pytest.raises(PrivacyError, match=OUTSIDE):
                loss(model, (X, Y)).mean().backward()
            for name, p in model.named_parameters():
                assert p.grad is None or torch.equal(p.grad, private[name]), "no raw gradient stays"
        public = torch.autograd.grad(loss(model, (X, Y)).mean(), list(model.parameters()))
        assert all(g.isfinite().all() for g in public), "as the error says, for public data"
    loss(model, (X, Y)).mean().backward()


def test_the_hooks_are_removed_after_an_error(folder: Path) -> None:
    model = net()
    with pytest.raises(ZeroDivisionError), opened(folder, model):
        raise ZeroDivisionError
    loss(model, (X, Y)).mean().backward()


def test_a_second_step_a_clipped_step_and_a_skipped_one_use_released_gradients(
    folder: Path,
) -> None:
    """None of these sees a record: ``.grad`` holds the released gradient, in place of what was
    there.
    """
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with opened(folder, model) as loop:
        for step in loop:
            released = step.backward().grads  # without zero_grad between two steps
            for name, p in model.named_parameters():
                assert torch.equal(p.grad, released[name]), "nothing accumulates"
            if step.number == 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            for _ in range(step.number):
                optimizer.step()
    assert loop.ledger.steps == STEPS and loop.spent().epsilon == loop.plan.epsilon


def test_len_is_the_number_of_steps_left(folder: Path) -> None:
    with opened(folder, net(), run="a") as loop:
        lengths = [len(loop) for step in loop if step.backward()]
    assert lengths == [3, 2, 1, 0]
    with opened(folder, net(), run="a", resume=True) as loop:
        assert len(loop) == 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copy_of_a_step_or_loop_gives_a_second_gradient(
    folder: Path, copied: Callable[[Any], Any]
) -> None:
    """As trainers copy batches, and settings for their checkpoints: a copy of the loop would hold
    keys and data.
    """
    with opened(folder, net()) as loop:
        step = next(iter(loop))
        if copied is copy.copy:
            other = copied(step)
            step.backward()
            with pytest.raises(PrivacyError, match="expected a step that was not drawn before"):
                other.backward()
        else:
            for value in (step, loop):
                with pytest.raises(TypeError):
                    copied(value)


# Wrapped models and prepared loaders


@pytest.mark.parametrize("kind", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_wrappers_for_several_devices_are_refused(folder: Path, kind: Any, tmp_path: Path) -> None:
    if kind is nn.parallel.DistributedDataParallel:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
        )
    try:
        with (
            pytest.raises(ConfigError, match=f"{kind.__name__} in 1 processes; expected the model"),
            opened(folder, kind(net())),
        ):
            pass
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert not folder.exists(), "nothing was charged or made"


def test_several_processes_are_refused_when_they_start_and_when_they_join(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would have a run of its own: their mean, as under Lightning's ddp, has the epsilon of
    both, and each would print its own.
    """
    with opened(folder, net()) as loop:
        step = next(iter(loop))
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(ConfigError, match="in 2 processes; expected the model itself"):
            step.backward()
        with pytest.raises(ConfigError, match="in 2 processes"), opened(folder, net()):
            pass


def test_accelerate_prepares_models_and_optimizers_but_no_loaders(folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs pip install 'dpvision[loops]'")
    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(X, Y), 8, shuffle=True))
    with (
        pytest.raises(ConfigError, match=r"data is a DataLoaderShard; .* Pass loader\.dataset"),
        opened(folder, net(), loader),
    ):
        pass
    original = net()
    model, optimizer = accelerator.prepare(original, torch.optim.SGD(original.parameters(), lr=0.1))
    with opened(folder, model) as loop:
        with pytest.raises(PrivacyError, match=OUTSIDE):
            accelerator.backward(loss(model, (X, Y)).mean())
        for step in loop:
            step.backward()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert moved(model) and loop.ledger.steps == STEPS


# Lightning


@pytest.fixture
def fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a module with these methods in a loop; returns it and the loop."""
    lightning = pytest.importorskip("lightning", reason="needs pip install 'dpvision[loops]'")

    class Module(lightning.LightningModule):
        def __init__(self, automatic: bool, turn: Callable[[Any, Any], Any]) -> None:
            super().__init__()
            self.automatic_optimization, self.turn, self.turns = automatic, turn, 0
            self.net = net()

        def training_step(self, batch: Any) -> Any:
            self.turns += 1
            return self.turn(self, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(
        turn: Callable[[Any, Any], Any] = turned,
        *,
        automatic: bool = False,
        fits: int = 1,
        batches: Any = None,
        **settings: Any,
    ) -> Any:
        module = Module(automatic, turn)
        with opened(folder, module.net) as loop:
            for _ in range(fits):
                trainer = lightning.Trainer(
                    **{"max_epochs": 1, **settings},
                    accelerator="cpu",
                    devices=1,
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                    default_root_dir=folder.parent,
                )
                trainer.fit(module, loop if batches is None else batches)
        return module, loop

    return run


def turned(module: Any, step: Any) -> None:
    step.backward()
    module.optimizers().step()


@pytest.mark.parametrize(
    ("settings", "turns"),
    [
        ({}, STEPS),
        ({"fits": 2}, STEPS),
        ({"max_epochs": 3}, STEPS),
        ({"max_steps": 2}, 2),
        ({"limit_train_batches": 1}, 1),
        ({"precision": "bf16-mixed"}, STEPS),
    ],
)
def test_lightning_turns_the_loop_which_ends_at_the_budget(
    fit: Callable[..., Any], folder: Path, settings: dict[str, Any], turns: int
) -> None:
    module, loop = fit(**settings)
    assert module.turns == loop.ledger.steps == turns and moved(module.net)
    assert loop.spent().epsilon == loop.plan.epsilon == store_account(folder).epsilon


def raw(module: Any, step: Any) -> Tensor:
    step.backward()
    return loss(module.net, (X, Y)).mean()


def by_hand(module: Any, step: Any) -> None:
    module.manual_backward(raw(module, step))


@pytest.mark.parametrize(
    ("turn", "settings"),
    [
        (raw, {"automatic": True}),
        (by_hand, {}),
        (
            lambda module, batch: loss(module.net, batch).mean(),
            {"automatic": True, "batches": DataLoader(TensorDataset(X, Y), 8, shuffle=True)},
        ),
    ],
    ids=["automatic", "manual_backward", "loader"],
)
def test_raw_gradients_under_lightning_are_refused(
    fit: Callable[..., Any], turn: Any, settings: dict[str, Any]
) -> None:
    modules = []

    def kept(module: Any, batch: Any) -> Any:
        modules.append(module)
        return turn(module, batch)

    with pytest.raises(PrivacyError, match=OUTSIDE):
        fit(kept, **settings)
    assert not moved(modules[0].net)


def test_automatic_optimisation_without_a_loss_moves_nothing(fit: Callable[..., Any]) -> None:
    """Lightning clears the gradients before its step."""
    module, loop = fit(lambda _module, step: step.backward() and None, automatic=True)
    assert loop.ledger.steps == STEPS and not moved(module.net)


def test_half_precision_weights_under_lightning_are_refused(fit: Callable[..., Any]) -> None:
    with pytest.raises(PrivacyError, match="trained parameters are bfloat16"):
        fit(precision="bf16-true")


def test_settings_that_lightning_refuses_itself(fit: Callable[..., Any]) -> None:
    for settings in ({"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}):
        with pytest.raises(Exception, match="not supported for manual optimization"):
            fit(**settings)


# Models of transformers and PEFT


def vit(**settings: Any) -> nn.Module:
    return timm.models.VisionTransformer(
        32, patch_size=8, num_classes=3, embed_dim=32, depth=2, num_heads=2, **settings
    )


def lora(model: nn.Module, **settings: Any) -> nn.Module:
    peft = pytest.importorskip("peft", reason="needs pip install 'dpvision[loops]'")
    config = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["attn.qkv", "attn.proj"],
        "modules_to_save": ["head"],
    }
    return peft.get_peft_model(model, peft.LoraConfig(**{**config, **settings}))


def of_transformers(kind: str, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs pip install 'dpvision[hf]'")
    sizes = {
        "ViT": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64},
        "Dinov2": {"hidden_size": 32, "num_hidden_layers": 2},
        "Swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        "ConvNext": {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]},
        "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    }[kind]
    if kind in ("ViT", "Dinov2"):
        sizes |= {"num_attention_heads": 2, "patch_size": 8}
    given = {"image_size": 32, "num_labels": 3, **sizes, **settings}
    config = getattr(transformers, f"{kind}Config")(**given)
    return getattr(transformers, f"{kind}ForImageClassification")(config)


def wrapped(**settings: Any) -> nn.Module:
    return lora(vit(), **settings)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lora": wrapped,
    "dora": lambda: wrapped(use_dora=True),
    "lora_bias": lambda: wrapped(bias="all"),
    "lora_convolution": lambda: wrapped(target_modules=["patch_embed.proj", "attn.qkv"]),
    "lora_saved_norm": lambda: wrapped(modules_to_save=["head", "norm"]),
    "lora_in_eval_mode": lambda: wrapped(lora_dropout=0.1).eval(),
    "vit_sdpa": lambda: of_transformers("ViT", attn_implementation="sdpa"),
    "vit_eager": lambda: of_transformers("ViT", attn_implementation="eager"),
    "vit_lora": lambda: lora(
        of_transformers("ViT"), target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]
    ),
    "dinov2": lambda: of_transformers("Dinov2"),
    "swin": lambda: of_transformers("Swin", drop_path_rate=0.0),
    "convnext": lambda: of_transformers("ConvNext"),
}


def losses(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    out = model(batch.image_BVCHW[:, 0])
    return F.cross_entropy(getattr(out, "logits", out), batch.label_B, reduction="none")


def image_batch() -> Batch:
    ids = torch.arange(1, len(IMAGES) + 1)
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), IMAGES[:, None], None, ids % 3)


def started(make: Callable[[], nn.Module]) -> nn.Module:
    """A model without zero parameters: behind them gradients vanish, as behind LoRA's B."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p if p.any() else 0.05 * torch.randn_like(p))
    return model


def by_autograd(model: nn.Module, batch: Batch, most: float) -> tuple[dict[str, Tensor], Tensor]:
    """The sum of gradients clipped to the norm ``most``, and the norms: one backward pass for each
    record, added up in float64.
    """
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total, norms = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in params.items()}, []
    for i in range(len(batch.record_id_B)):
        grads = torch.autograd.grad(
            losses(model, take(batch, slice(i, i + 1)), KEY).sum(),
            list(params.values()),
            allow_unused=True,
            materialize_grads=True,
        )
        norms.append(torch.cat([grad.double().flatten() for grad in grads]).norm())
        for value, grad in zip(total.values(), grads, strict=True):
            value += grad.double() * min(1.0, most / float(norms[-1]))
    return total, torch.stack(norms)


def off(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    rest = sum((found[n].double() - v).square().sum() for n, v in expected.items())
    return float((rest / sum(v.square().sum() for v in expected.values())) ** 0.5)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_single_records_by_autograd(name: str) -> None:
    """To 1e-6 in float32, where nothing is clipped. Where all are clipped, in float64: the factor
    for float32 is that of the norm and the bound on its error.
    """
    model, batch = started(MODELS[name]), image_batch()
    check_separable(losses, model, batch, KEY)
    whole, norms_B = by_autograd(model, batch, 1e9)
    found = clipped_sum(losses, model, batch, KEY, max_grad_norm=1e9)
    assert off(found.grads, whole) < 1e-6
    torch.testing.assert_close(found.norms_B.double(), norms_B, rtol=1e-6, atol=0)
    assert norms_B.min() > 0.5, "all are clipped"
    model, batch = model.double(), in_float64(batch)
    found = clipped_sum(losses, model, batch, KEY, max_grad_norm=0.5)
    clipped, _ = by_autograd(model, batch, 0.5 * (1 - reserve(torch.float64)))
    assert off(found.grads, clipped) < 1e-12


@pytest.mark.parametrize(
    ("make", "layer"),
    [
        (lambda: wrapped(lora_dropout=0.1), r"qkv\.lora_dropout\.default' \(Dropout\)"),
        (lambda: of_transformers("Swin"), r"drop_path' \(SwinDropPath\)"),
        (lambda: vit(drop_path_rate=0.2), r"drop_path1' \(DropPath\)"),
        (lambda: of_transformers("ResNet"), r"normalization' \(BatchNorm2d\)"),
        (lambda: of_transformers("ViT", attention_probs_dropout_prob=0.1), "different gradients"),
    ],
    ids=["lora_dropout", "swin", "drop_path", "batch_norm", "attention_dropout"],
)
def test_what_mixes_or_draws_is_refused(make: Callable[[], nn.Module], layer: str) -> None:
    with pytest.raises(PrivacyError, match=f"separability: .*{layer}"):
        check_separable(losses, make().train(), image_batch(), KEY)


def test_the_mean_loss_of_a_transformers_model_is_refused() -> None:
    def own(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        return model(pixel_values=batch.image_BVCHW[:, 0], labels=batch.label_B).loss

    with pytest.raises(PrivacyError, match="expected one per record"):
        check_separable(own, of_transformers("ViT"), image_batch(), KEY)


def test_only_adapters_and_saved_modules_get_gradients() -> None:
    model = wrapped()
    names = clipped_sum(losses, model, image_batch(), KEY, max_grad_norm=1.0).grads
    assert names and all("lora_" in name or "head.modules_to_save" in name for name in names)


def test_merged_adapters_are_not_in_the_pass_and_get_noise_only() -> None:
    """The sum is right: no record reaches them."""
    model = started(wrapped)
    model.merge_adapter()
    total = clipped_sum(losses, model, image_batch(), KEY, max_grad_norm=0.5)
    assert all(bool(v.any()) != ("lora_" in name) for name, v in total.grads.items())


def test_a_peft_model_is_described_until_it_changes() -> None:
    """Else the check of separability is made at every pass: PEFT's modules import what cannot be
    described.
    """
    model = wrapped()
    before = held(losses, model)
    assert not isinstance(before, Undescribed) and held(losses, model) == before
    model.merge_adapter()
    assert held(losses, model) != before


# The Trainer of transformers


def trainer_of(loop: PrivateLoop, folder: Path, own: bool, **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs pip install 'dpvision[hf]'")
    pytest.importorskip("accelerate", reason="needs pip install 'dpvision[loops]'")

    class Trainer(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            if not own:
                return super().training_step(model, inputs, num_items_in_batch)
            next(turns).backward()
            return torch.zeros(())

        def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
            return loss(model, (inputs["x"], inputs["labels"])).mean()

    turns = iter(loop)
    arguments = transformers.TrainingArguments(
        **{"max_steps": STEPS, **settings},
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    rows = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    return Trainer(loop.model, arguments, train_dataset=rows)


def test_the_trainer_of_transformers_steps_by_the_loop(folder: Path, tmp_path: Path) -> None:
    model = net()
    with opened(folder, model) as loop:
        trainer_of(loop, tmp_path, own=True).train()
    assert loop.ledger.steps == STEPS and moved(model)


@pytest.mark.parametrize(
    ("own", "settings", "error"),
    [
        (False, {}, PrivacyError),
        (True, {"max_steps": STEPS + 1}, StopIteration),
        (True, {"gradient_accumulation_steps": 2}, StopIteration),
    ],
    ids=["raw", "more_steps", "accumulation"],
)
def test_the_trainer_of_transformers_gets_no_step_beyond_the_budget_and_no_raw_gradient(
    folder: Path, tmp_path: Path, own: bool, settings: dict[str, Any], error: type[Exception]
) -> None:
    model = net()
    with opened(folder, model) as loop, pytest.raises(error):
        trainer_of(loop, tmp_path, own, **settings).train()
    assert loop.ledger.steps == (STEPS if own else 0) and moved(model) == own
