"""What is trained: counts against closed formulas, sums against the oracles, and that frozen parts
are left alone and cost nothing.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from dpvision.config import ClassifierConfig, EncoderConfig, ResNetConfig, TimmConfig, ViTConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import clipped_sum
from dpvision.dp.route import make_route
from dpvision.dp.separable import check_separable
from dpvision.dp.support import check_exact
from dpvision.errors import ConfigError, PrivacyError
from dpvision.models import count_parameters, make_model, make_model_on_meta
from dpvision.models.classifier import Classifier, losses
from dpvision.models.tuned import LoRA, blocks_of, merged, plain_names
from dpvision.train.objectives import classification_losses

K = 4
VIT = ViTConfig(image_size=16, patch_size=4, depth=3, width=16, num_heads=2)
RESNET = ResNetConfig(image_size=16, depths=(1, 2), widths=(8, 16), stem_width=8, groups=4)
TIMM_VIT = TimmConfig(
    name="vit_tiny_patch16_224",
    image_size=32,
    options=("patch_size=8", "embed_dim=12", "depth=2", "num_heads=2", "init_values=0.1"),
)
BIT = TimmConfig(
    name="resnetv2_50x1_bit",
    image_size=32,
    options=("layers=[1,1]", "channels=[32,64]", "stem_chs=32"),
)
BIT = replace(BIT, name="resnetv2_101x1_bit", options=("channels=[32,32,64,64]", "stem_chs=32"))
CONVNEXT = TimmConfig(
    name="convnext_tiny", image_size=32, options=("depths=[1,1,1,1]", "dims=[6,8,8,12]")
)
SWIN = TimmConfig(
    name="swin_tiny_patch4_window7_224",
    image_size=32,
    options=(
        "window_size=4",
        "embed_dim=8",
        "depths=[2,1]",
        "num_heads=[2,2]",
        "drop_path_rate=0.0",
    ),
)
EFFICIENT = TimmConfig(name="test_efficientnet", image_size=32)  # BatchNorm
RES = TimmConfig(name="test_resnet", image_size=32)  # BatchNorm too
WAYS = ("whole", "last_blocks", "head", "lora", "film", "biases")
KEY = StepKey(0, 0)


def make_config(encoder: EncoderConfig = VIT, **changes) -> ClassifierConfig:
    pooling = "own" if isinstance(encoder, TimmConfig) else "mean"
    return ClassifierConfig(
        encoder=encoder,
        num_classes=K,
        **({"head_init": "lecun", "pooling": pooling, "lora_rank": 2} | changes),
    )


def awake(model: nn.Module) -> nn.Module:
    """Every parameter and BatchNorm's statistics moved: behind zeros, all gradients are zero and
    any sum of them exact.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if "running_" in name:
                buffer.add_(0.5 * torch.rand(buffer.shape, generator=generator))
    return model


def make_batch(size: int, num: int = 3, views: int = 1) -> Batch:
    x = torch.randn(num, views, 3, size, size, generator=torch.Generator().manual_seed(1))
    return Batch(
        torch.arange(1, num + 1),
        torch.ones(num, dtype=torch.bool),
        x,
        label_B=torch.arange(num) % K,
    )


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("encoder", [VIT, TIMM_VIT, EFFICIENT], ids=["ours", "timm", "batch_norm"])
def test_the_clipped_sum_of_every_way_is_that_of_the_vmap_oracle(
    way: str, encoder: EncoderConfig
) -> None:
    where = "both" if encoder is EFFICIENT else "attention"
    model = awake(make_model(make_config(encoder, tuned=way, lora_on=where), 0)).double()
    batch = make_batch(encoder.image_size, views=2)
    batch = batch._replace(image_BVCHW=batch.image_BVCHW.double())
    probe = clipped_sum(classification_losses, model, batch, KEY, max_grad_norm=1e6)
    most = float(probe.norms_B.median())
    total, oracle = (
        clipped_sum(classification_losses, model, batch, KEY, max_grad_norm=most, method=method)
        for method in ("one_pass", "vmap")
    )
    assert set(total.grads) == trained(model) and (oracle.norms_B > most).any()
    for name, value in oracle.grads.items():
        torch.testing.assert_close(total.grads[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("encoder", "way"),
    [
        (RESNET, "film"),
        (RESNET, "biases"),
        (RESNET, "last_blocks"),
        (CONVNEXT, "whole"),
        (CONVNEXT, "film"),
        (CONVNEXT, "lora"),
        (SWIN, "lora"),
        (SWIN, "film"),
        (SWIN, "biases"),
        (EFFICIENT, "whole"),
        (EFFICIENT, "film"),
        (EFFICIENT, "lora"),
        (EFFICIENT, "biases"),
        (EFFICIENT, "last_blocks"),
        (RES, "last_blocks"),
    ],
)
def test_the_gates_before_a_run_pass_and_nothing_is_slow(encoder: EncoderConfig, way: str) -> None:
    """The gates compare with single records in float64, to 1e-9."""
    where = "attention" if encoder is SWIN else "both"
    model, batch = (
        awake(make_model(make_config(encoder, tuned=way, lora_on=where), 0)),
        make_batch(encoder.image_size),
    )
    check_separable(classification_losses, model, batch, KEY)
    check_exact(classification_losses, model, batch, KEY)
    assert make_route(classification_losses, model, batch, KEY).slow == {}


def vit_counts(depth: int, width: int, num_tokens: int, patch: int = 16) -> dict[str, int]:
    """Trained numbers of timm's ViT without its head, from the dimensions alone."""
    block = 12 * width**2 + 13 * width
    return {
        "whole": depth * block
        + 2 * width
        + 3 * patch**2 * width
        + width
        + width
        + num_tokens * width,
        "last_blocks": 2 * block + 2 * width,
        "head": 0,
        "lora": depth * 8 * (4 + 2) * width,
        "film": 2 * width * (2 * depth + 1),
        "biases": depth * (3 + 1 + 4 + 1 + 2) * width + width + width,
    }


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "depth", "width", "patch", "grid"),
    [
        ("vit_base_patch16_224", 12, 768, 16, 24),
        ("vit_large_patch16_224", 24, 1024, 16, 24),
        ("vit_huge_patch14_224", 32, 1280, 14, 27),
    ],
)
def test_trained_parameters_of_the_papers_transformers(
    way: str, name: str, depth: int, width: int, patch: int, grid: int
) -> None:
    """384 px; ViT-H/14 sees 27 x 27 whole patches of it. FiLM on ViT-B/16: 38,400 (Tobaben et al.
    2023).
    """
    encoder = TimmConfig(name=name, image_size=384)
    cfg = ClassifierConfig(
        encoder=encoder,
        num_classes=1000,
        tuned=way,
        last_blocks=2,
        pooling="own",
        train_head_bias=False,
    )
    assert count_parameters(cfg) == vit_counts(depth, width, grid**2 + 1, patch)[way] + 1000 * width


def bit_counts(depths: tuple[int, ...], factor: int) -> tuple[int, int]:
    """Trained numbers, and those of FiLM, of a BiT network without its head: bottlenecks, norms
    before convolutions, no biases in these.
    """
    inputs, total, film = 64 * factor, 7 * 7 * 3 * 64 * factor, 0
    for depth, channels in zip(depths, (256, 512, 1024, 2048), strict=True):
        outputs = channels * factor
        inner = outputs // 4
        for i in range(depth):
            norms = inputs + inner + inner
            total += (
                inputs * inner
                + 9 * inner**2
                + inner * outputs
                + 2 * norms
                + (inputs * outputs if i == 0 else 0)
            )
            film += 2 * norms
            inputs = outputs
    return total + 2 * inputs, film + 2 * inputs


@pytest.mark.parametrize(
    ("name", "depths", "factor"),
    [("resnetv2_50x4_bit", (3, 4, 6, 3), 4), ("resnetv2_152x4_bit", (3, 8, 36, 3), 4)],
)
def test_trained_parameters_of_the_papers_residual_networks(
    name: str, depths: tuple[int, ...], factor: int
) -> None:
    cfg = ClassifierConfig(
        encoder=TimmConfig(name=name, image_size=384),
        num_classes=1000,
        pooling="own",
        train_head_bias=False,
    )
    whole, film = bit_counts(depths, factor)
    head = 1000 * 2048 * factor
    assert count_parameters(cfg) == whole + head
    assert count_parameters(replace(cfg, tuned="film")) == film + head
    assert count_parameters(replace(cfg, tuned="head", train_head_bias=True)) == head + 1000


def test_bit_of_a_width_that_timm_lacks_is_timms_of_a_width_that_it_has() -> None:
    """50x3 is in both: the same network under our regular expression and under timm's
    registration.
    """
    import timm

    from dpvision.models.timm_encoder import _bit

    with torch.device("meta"):
        ours, theirs = (
            _bit(TimmConfig(name="resnetv2_50x3_bit")),
            timm.create_model("resnetv2_50x3_bit", num_classes=0),
        )
    assert repr(ours) == repr(theirs)
    assert {n: p.shape for n, p in ours.state_dict().items()} == {
        n: p.shape for n, p in theirs.state_dict().items()
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_start_is_the_same_function_in_every_way(way: str) -> None:
    """Additions start at nothing, and the seed gives the same weights beside them."""
    x = make_batch(16).image_BVCHW[:, 0]
    plain, tuned = (make_model(make_config(tuned=t), 5) for t in ("whole", way))
    names = plain_names(tuned)
    assert set(names) == set(plain.state_dict())
    assert all(
        torch.equal(tuned.state_dict()[own], plain.state_dict()[name])
        for name, own in names.items()
    )
    with torch.no_grad():
        torch.testing.assert_close(tuned(x), plain(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "encoder",
    [VIT, RESNET, TIMM_VIT, CONVNEXT, EFFICIENT],
    ids=["vit", "resnet", "timm", "convnext", "batch_norm"],
)
@pytest.mark.parametrize("way", ["lora", "film"])
def test_merged_additions_are_the_same_function(encoder: EncoderConfig, way: str) -> None:
    if encoder is RESNET and way == "lora":
        pytest.skip("no linear maps")
    cfg = make_config(encoder, tuned=way, lora_scale=0.5, lora_on="both")
    tuned, plain = awake(make_model(cfg, 5)), make_model(replace(cfg, tuned="whole"), 0)
    plain.load_state_dict(merged(tuned.state_dict(), 0.5))
    x = make_batch(encoder.image_size).image_BVCHW[:, 0]
    with torch.no_grad():
        torch.testing.assert_close(plain(x), tuned(x), rtol=1e-4, atol=1e-5)
    assert merged(plain.state_dict(), 0.5).keys() == plain.state_dict().keys()


def test_lora_adds_the_scaled_product_of_its_matrices() -> None:
    model = awake(make_model(make_config(tuned="lora", lora_scale=3.0), 0))
    layer = model.encoder.blocks[1].attention.qkv
    assert isinstance(layer, LoRA) and layer.down.shape == (2, 16) and layer.up.shape == (48, 2)
    x = torch.randn(5, 16)
    with torch.no_grad():
        wanted = x @ (layer.frozen.weight + 3.0 * layer.up @ layer.down).T + layer.frozen.bias
        torch.testing.assert_close(layer(x), wanted)


def test_frozen_blocks_are_outside_the_graph() -> None:
    """No gradient is computed for, or through, what comes before the first trained part."""
    model = make_model(make_config(tuned="last_blocks", last_blocks=1), 0)
    needs = []
    for block in blocks_of(model.encoder):
        block.register_forward_hook(lambda _m, _i, out: needs.append(out.requires_grad))
    losses(model, make_batch(16).image_BVCHW, torch.tensor([0, 1, 2]))
    assert needs == [False, False, True]
    head = make_model(make_config(tuned="head"), 0)
    assert (
        trained(head) == {"head.weight", "head.bias"}
        and not head.features(torch.randn(1, 3, 16, 16)).requires_grad
    )


def test_what_each_way_trains_by_name() -> None:
    def names(**changes) -> set[str]:
        return trained(make_model(make_config(**changes), 0))

    every = trained(make_model(make_config(), 0))
    assert names(tuned="last_blocks", last_blocks=2) == {
        n
        for n in every
        if n.startswith(("encoder.blocks.1", "encoder.blocks.2", "encoder.norm", "head"))
    }
    assert names(tuned="last_blocks", last_blocks=3) == {
        n for n in every if n.startswith(("encoder.blocks", "encoder.norm", "head"))
    }
    assert names(tuned="biases") == {n for n in every if n.endswith(".bias")} | {"head.weight"}
    assert names(tuned="whole", train_head_bias=False) == every - {"head.bias"}
    assert {n.rpartition(".")[0] for n in names(tuned="lora", lora_on="mlp")} == {
        "head",
        *(f"encoder.blocks.{i}.mlp.{j}" for i in range(3) for j in (0, 2)),
    }
    film = names(tuned="film")
    assert {n.rpartition(".")[2] for n in film if n.startswith("encoder")} == {
        "scale",
        "shift",
    } and len(film) == 2 * (2 * 3 + 1) + 2


def test_what_each_way_trains_with_batch_norm() -> None:
    def names(encoder: TimmConfig, **changes) -> set[str]:
        found = trained(make_model(make_config(encoder, lora_on="both", **changes), 0))
        return {n.removeprefix("encoder.model.") for n in found if n.startswith("encoder")}

    model = make_model(make_config(EFFICIENT), 0).encoder.model
    norms = {n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    film = names(EFFICIENT, tuned="film")
    assert film == {f"{n}.{kind}" for n in norms for kind in ("scale", "shift")}
    reduced = {n for n, m in model.named_modules() if n.endswith(("conv_reduce", "conv_expand"))}
    assert names(EFFICIENT, tuned="biases") == {f"{n}.bias" for n in norms | reduced}
    lora = {n.rpartition(".")[0] for n in names(EFFICIENT, tuned="lora")}
    ones = {n for n, m in model.named_modules() if getattr(m, "kernel_size", 0) == (1, 1)}
    assert lora == ones - {"conv_head"}
    last = {n for n in names(RES) if n.startswith("layer4.")}
    assert names(RES, tuned="last_blocks") == last


@pytest.mark.parametrize("way", ["whole", "film"])
def test_batch_norm_stays_in_evaluation_mode_and_keeps_its_statistics(way: str) -> None:
    model = make_model(make_config(EFFICIENT, tuned=way), 0)
    for changed in (model, copy.deepcopy(model), model.train(), model.eval().train().double()):
        assert changed.training and changed.encoder.model.blocks.training
        norms = [m for m in changed.modules() if isinstance(m, nn.BatchNorm2d)]
        assert norms and not any(norm.training for norm in norms)
    before = {name: value.clone() for name, value in model.named_buffers()}
    x = model.encoder.places(make_batch(32).image_BVCHW[:, 0].double())
    assert x.requires_grad and all(torch.equal(v, before[n]) for n, v in model.named_buffers())
    model.encoder.model.bn1.train()
    with pytest.raises(PrivacyError, match=r"bn1.*uses statistics of the batch"):
        clipped_sum(
            classification_losses,
            model,
            make_batch(32),
            KEY,
            max_grad_norm=1.0,
            check_separability=False,
        )


def test_the_mean_over_positions_has_exact_gradients_behind_batch_norm_for_one_image_too() -> None:
    """torch 2.15 gives wrong ones on a CPU if the mean is taken over tokens."""
    encoder = replace(EFFICIENT, image_size=64)  # a last map of 2 x 2
    cfg = make_config(encoder, pooling="mean", tuned="last_blocks")
    check_exact(classification_losses, awake(make_model(cfg, 0)), make_batch(64), KEY)


def test_film_stands_between_a_norm_and_its_activation() -> None:
    """BiT's norms have the ReLU in them: a shift after it would give negative numbers."""
    model = make_model(
        make_config(TimmConfig(name="resnetv2_50x1_bit", image_size=32), tuned="film"), 0
    )
    film = model.encoder.model.norm
    with torch.no_grad():
        film.shift.fill_(-0.5)
        film.scale.fill_(1.0)
        x = torch.randn(2, 2048, 1, 3)
        wanted = (
            2
            * torch.nn.functional.group_norm(
                x, 32, film.frozen.weight, film.frozen.bias, film.frozen.eps
            )
            - 0.5
        ).relu()
        torch.testing.assert_close(film(x), wanted)


@pytest.mark.parametrize("init", ["zero", "xavier", "lecun"])
def test_the_heads_start(init: str) -> None:
    cfg = ClassifierConfig(
        encoder=replace(VIT, width=256),
        num_classes=1000,
        head_init=init,
        head_scale=0.1,
        head_bias=-10.0,
    )
    head = make_model(cfg, 0).head
    wanted = {"zero": 0.0, "xavier": 0.1 * (2 / (256 + 1000)) ** 0.5, "lecun": 0.1 * 256**-0.5}[
        init
    ]
    assert float(head.weight.std()) == pytest.approx(wanted, rel=0.01) and (head.bias == -10).all()
    assert head.weight.requires_grad and head.bias.requires_grad


def test_the_sigmoid_loss_is_the_sum_of_the_classes_log_losses_with_one_label_or_several() -> None:
    from sklearn.metrics import log_loss

    model = make_model(make_config(loss="sigmoid", head_bias=-1.0), 0)
    batch = make_batch(16, views=2)
    target = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    with torch.no_grad():
        one, several = (
            losses(model, batch.image_BVCHW, batch.label_B),
            losses(model, batch.image_BVCHW, target),
        )
        for i in range(3):
            p = model(batch.image_BVCHW[i]).double().sigmoid()
            for found, truth in (
                (one, nn.functional.one_hot(batch.label_B[i], K)),
                (several, target[i]),
            ):
                slow = sum(
                    log_loss([int(t)] * 2, p[:, k].numpy(), labels=[0, 1])
                    for k, t in enumerate(truth)
                )
                assert float(found[i]) == pytest.approx(slow, rel=1e-5)
        assert torch.equal(
            losses(model, batch.image_BVCHW, nn.functional.one_hot(batch.label_B, K)), one
        )


@pytest.mark.parametrize("method", ["one_pass", "vmap"])
def test_an_impossible_target_raises_nothing_and_contributes_exactly_zero(method: str) -> None:
    model = make_model(make_config(loss="sigmoid"), 0)
    for label in (torch.tensor([[0, 2, 0, 0]]), torch.tensor([[0, -1, 1, 0]]), torch.tensor([K])):
        batch = make_batch(16, num=1)._replace(label_B=label)
        total = clipped_sum(
            classification_losses, model, batch, KEY, max_grad_norm=1.0, method=method
        )
        assert (
            all(not value.any() for value in total.grads.values()) and total.losses_B.isnan().all()
        )


@pytest.mark.parametrize(
    ("encoder", "changes", "words"),
    [
        (VIT, {"lora_rank": 0}, "lora_rank=0; expected at least 1"),
        (VIT, {"tuned": "lora", "lora_rank": 17}, "lora_rank=17; expected at most 16"),
        (VIT, {"tuned": "last_blocks", "last_blocks": 4}, "last_blocks=4; expected at most 3"),
        (VIT, {"last_blocks": 0}, "last_blocks=0; expected at least 1"),
        (VIT, {"pooling": "own"}, "pooling='own'; expected 'mean' or 'cls'"),
        (VIT, {"head_scale": float("nan")}, "head_scale=nan"),
        (VIT, {"head_bias": float("inf")}, "head_bias=inf"),
        (
            RESNET,
            {"tuned": "lora"},
            "tuned='lora'; expected an encoder with linear maps.*Use film or biases",
        ),
        (
            replace(RESNET, norm="none"),
            {"tuned": "film"},
            "tuned='film'; expected an encoder with norms.*Use biases",
        ),
        (EFFICIENT, {"tuned": "lora"}, "lora_on='attention'.*Pass --model.lora-on both"),
        (
            TimmConfig(name="vit_base_patch15_224"),
            {},
            "name='vit_base_patch15_224'; expected one of timm's models",
        ),
        (
            TimmConfig(name="convnext_atto"),
            {"pooling": "cls"},
            "pooling='cls'.*convnext_atto has no class token",
        ),
        (
            replace(TIMM_VIT, options=("num_heads=5",)),
            {},
            r"options=\['num_heads=5'\].*expected arguments that timm",
        ),
        (
            replace(TIMM_VIT, options=("colour=5",)),
            {},
            r"options=\['colour=5'\].*expected arguments that timm",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(
    encoder: EncoderConfig, changes: dict, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_model_on_meta(make_config(encoder, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "vit_base_patch16_224.augreg_in21k"}, "without a tag"),
        ({"options": ("depth",)}, "'depth'; expected NAME=VALUE"),
        ({"options": ("depth=six",)}, "'depth=six'; expected NAME=VALUE"),
        ({"image_size": 0}, "image_size=0"),
    ],
)
def test_settings_of_a_timm_encoder_are_checked(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TimmConfig(**changes)


def test_a_timm_encoders_weights_are_the_seeds_and_the_global_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (
        make_model(make_config(TIMM_VIT), seed).state_dict() for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(
        first["encoder.model.blocks.0.attn.qkv.weight"],
        other["encoder.model.blocks.0.attn.qkv.weight"],
    )


@pytest.mark.parametrize("pooling", ["mean", "cls", "own"])
def test_what_a_head_sees_of_a_timm_model_is_what_the_frozen_encoder_gives(pooling: str) -> None:
    """encoders.third_party, which is tested against timm's own forward pass."""
    from dpvision.encoders.third_party import encoder_from
    from dpvision.encoders.weights_file import WeightsFile

    model = make_model(
        make_config(TimmConfig(name="test_vit", image_size=160), pooling=pooling), 0
    ).eval()
    tensors = {name: t for name, t in model.encoder.model.state_dict().items()}
    frozen = encoder_from("timm", "test_vit", "x", WeightsFile(tensors, ()), "x")
    x = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        found = frozen.poolings(x)
        torch.testing.assert_close(
            model.features(x), found["cls" if pooling == "own" else pooling], rtol=1e-4, atol=1e-5
        )
    assert isinstance(model, Classifier)
