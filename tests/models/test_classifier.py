"""Classifiers: the head sees what it says, the loss is the cross-entropy of all views, an
impossible label takes no part.
"""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from dpvision.config import (
    ClassifierConfig,
    MAEConfig,
    ResNetConfig,
    RunConfig,
    ViTConfig,
    from_dict,
    to_dict,
)
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import clipped_sum
from dpvision.dp.rounding import reserve
from dpvision.errors import ConfigError
from dpvision.models import count_parameters, make_model
from dpvision.models.classifier import Classifier, losses
from dpvision.recipes import RECIPES
from dpvision.train.objectives import classification_losses

VIT = ViTConfig(image_size=16, patch_size=4, depth=1, width=16, num_heads=2)
RESNET = ResNetConfig(image_size=16, depths=(1, 1), widths=(8, 16), stem_width=8, groups=4)
ENCODERS = pytest.mark.parametrize("encoder", [VIT, RESNET], ids=["vit", "resnet"])


def make_classifier(encoder: ViTConfig | ResNetConfig = VIT, **changes) -> Classifier:
    return make_model(
        ClassifierConfig(encoder=encoder, num_classes=4, head_init="xavier", **changes), 0
    )


def make_batch(labels: list[int], views: int = 3) -> Batch:
    num = len(labels)
    x = torch.randn(num, views, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return Batch(
        torch.arange(1, num + 1), torch.ones(num, dtype=torch.bool), x, label_B=torch.tensor(labels)
    )


def sums(
    model: Classifier, batch: Batch, method: str = "one_pass", max_grad_norm: float | None = 1.0
):
    return clipped_sum(
        classification_losses,
        model,
        batch,
        StepKey(0, 0),
        max_grad_norm=max_grad_norm,
        method=method,
    )


def test_the_head_sees_the_mean_of_the_patches_or_the_class_token() -> None:
    x = make_batch([0, 1], views=1).image_BVCHW[:, 0]
    for pooling in ("mean", "cls"):
        model = make_classifier(pooling=pooling)
        with torch.no_grad():
            token = model.encoder(x)
            wanted = (
                torch.stack([token[:, 1 + i] for i in range(16)]).sum(0) / 16
                if pooling == "mean"
                else token[:, 0]
            )
            torch.testing.assert_close(model.features(x), wanted)
            torch.testing.assert_close(model(x), wanted @ model.head.weight.T + model.head.bias)
    model = make_classifier(RESNET)
    with torch.no_grad():
        torch.testing.assert_close(model.features(x), model.encoder(x).flatten(2).sum(2) / 64)


@ENCODERS
def test_a_records_loss_is_the_mean_cross_entropy_of_its_views(
    encoder: ViTConfig | ResNetConfig,
) -> None:
    model, batch = make_classifier(encoder), make_batch([2, 0, 3])
    with torch.no_grad():
        found = losses(model, batch.image_BVCHW, batch.label_B)
        for i, label in enumerate([2, 0, 3]):
            probability = model(batch.image_BVCHW[i]).double().softmax(1).numpy()
            assert found[i] == pytest.approx(
                log_loss(np.full(3, label), probability, labels=range(4)), rel=1e-5
            )


@ENCODERS
def test_the_sum_of_several_views_is_that_of_their_mean_gradients_clipped_once(
    encoder: ViTConfig | ResNetConfig,
) -> None:
    model, batch = make_classifier(encoder).double(), make_batch([2, 0, 3])
    batch = batch._replace(image_BVCHW=batch.image_BVCHW.double())
    total, clip = sums(model, batch, max_grad_norm=0.5), 0.5 * (1 - reserve(torch.float64))
    wanted = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(3):
        views = [
            torch.autograd.grad(
                torch.nn.functional.cross_entropy(model(x[None]), batch.label_B[i : i + 1]),
                list(model.parameters()),
            )
            for x in batch.image_BVCHW[i]
        ]
        mean = [torch.stack(parts).mean(0) for parts in zip(*views, strict=True)]
        factor = min(1.0, clip / float(torch.cat([g.flatten() for g in mean]).norm()))
        for (name, _), g in zip(model.named_parameters(), mean, strict=True):
            wanted[name] += factor * g
    for name, value in wanted.items():
        torch.testing.assert_close(total.grads[name], value, rtol=1e-7, atol=1e-9, msg=name)


@ENCODERS
@pytest.mark.parametrize("method", ["one_pass", "vmap"])
@pytest.mark.parametrize("label", [-1, -100, 4, 2**40])
def test_an_impossible_label_raises_nothing_and_contributes_exactly_zero(
    encoder: ViTConfig | ResNetConfig, method: str, label: int
) -> None:
    model = make_classifier(encoder)
    alone = sums(model, make_batch([label]), method)
    assert all(not value.any() for value in alone.grads.values()) and alone.losses_B.isnan().all()
    good = make_batch([1, 2, 0])
    bad = good._replace(label_B=torch.tensor([1, label, 0]))
    kept = good._replace(valid_B=torch.tensor([True, False, True]))
    for name, value in sums(model, kept, method).grads.items():
        torch.testing.assert_close(
            sums(model, bad, method).grads[name], value, rtol=1e-5, atol=1e-6, msg=name
        )


def test_an_impossible_label_does_not_poison_a_sum_without_a_clip() -> None:
    model = make_classifier()
    total = sums(model, make_batch([1, 7, 0]), max_grad_norm=None)
    assert all(torch.isfinite(value).all() and value.any() for value in total.grads.values())


def test_the_fine_tuned_vit_is_timms_but_for_the_fixed_positions() -> None:
    # vit_base_patch16_224 has 86,567,656 parameters, of which 197 x 768 are trained positions.
    config = RECIPES["vip.dp_finetune"]().model
    assert count_parameters(config) == 86_567_656 - 197 * 768


def test_models_and_encoders_in_json_are_told_apart_by_kind() -> None:
    for name in ("vip.micro", "vip.micro_finetune", "supervised.micro"):
        config = RECIPES[name]()
        again = from_dict(RunConfig, json.loads(json.dumps(to_dict(config))))
        assert (
            again == config
            and type(again.model) is type(config.model)
            and type(again.model.encoder) is type(config.model.encoder)
        )


def test_a_config_written_before_encoders_had_a_kind_is_a_vit() -> None:
    old = to_dict(RECIPES["vip.micro"]())
    del old["model"]["encoder"]["kind"]
    assert from_dict(RunConfig, old) == RECIPES["vip.micro"]()
    assert isinstance(from_dict(RunConfig, old).model, MAEConfig)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "gan"}, r"config\.model\.kind: 'gan'; expected kind 'mae', 'classifier'"),
        ({"kind": ["mae"]}, r"config\.model\.kind: \['mae'\]; expected kind"),
        (
            {"encoder": {"kind": "vgg"}},
            r"config\.model\.encoder\.kind: 'vgg'; expected kind 'vit', 'resnet'",
        ),
        ({"encoder": {"kind": "resnet", "patch_size": 4}}, r"config\.model\.encoder: patch_size"),
        (
            {"encoder": {"kind": "resnet", "depths": [1, "two"]}},
            r"config\.model\.encoder\.depths: 'two'",
        ),
        ({"encoder": 3}, r"config\.model\.encoder: 3; expected kind"),
    ],
)
def test_an_unknown_kind_or_a_setting_of_another_kind_names_its_place(
    change: dict, words: str
) -> None:
    good = to_dict(RECIPES["supervised.micro"]())
    with pytest.raises(ConfigError, match=words):
        from_dict(RunConfig, {**good, "model": {**good["model"], **change}})


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pooling='cls'.*no class token"):
        ClassifierConfig(encoder=RESNET, pooling="cls")
    with pytest.raises(ConfigError, match="num_classes=1"):
        ClassifierConfig(num_classes=1)
    with pytest.raises(ConfigError, match="head_init='ones'"):
        ClassifierConfig(head_init="ones")  # type: ignore[arg-type]
