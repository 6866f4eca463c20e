"""timm's and torchvision's models as encoders: their own forward pass is the oracle."""

import timm
import torch
import torchvision
from pytest import mark, param, raises
from safetensors.torch import save_file

from dpvision.encoders.identity import check_places
from dpvision.encoders.open import open_encoder
from dpvision.encoders.third_party import encoder_from, third_party_encoder
from dpvision.encoders.weights_file import WeightsFile
from dpvision.errors import CheckpointError, ConfigError
from dpvision.synthetic.textures import textures

VIT = "vit_tiny_patch16_224"


def _images(size: int, num: int = 2) -> torch.Tensor:
    return torch.randn(num, 3, size, size, generator=torch.Generator().manual_seed(1))


def _weights(model: torch.nn.Module, path, prefix: str = ""):
    save_file({prefix + n: t.contiguous().clone() for n, t in model.state_dict().items()}, path)
    return path


def test_a_timm_transformer_gives_its_own_tokens_pooled(tmp_path):
    torch.manual_seed(3)
    model = timm.create_model(
        VIT, pretrained=False, num_classes=7
    ).eval()  # a head of another size than the library's
    encoder = open_encoder(f"timm:{VIT}@{_weights(model, tmp_path / 'w.safetensors')}")
    x_BCHW = _images(224)
    with torch.no_grad():
        token_BLD = model.forward_features(x_BCHW)
        found = encoder.poolings(x_BCHW)
        blocks = encoder.blocks(x_BCHW)
        taken = []
        hooks = [b.register_forward_hook(lambda *a: taken.append(a[2])) for b in model.blocks]
        model(x_BCHW)
        for hook in hooks:
            hook.remove()
    assert (
        list(found) == ["mean", "2x2", "cls"]
        and encoder.family == "transformer"
        and encoder.image_size == 224
    )
    assert torch.allclose(found["mean"], token_BLD[:, 1:].mean(1), atol=1e-6)
    assert torch.allclose(found["cls"], token_BLD[:, 0])
    corner = (
        token_BLD[:, 1:].reshape(2, 14, 14, -1)[:, :7, 7:].mean((1, 2))
    )  # top right: the second quarter
    assert torch.allclose(found["2x2"][:, 192:384], corner, atol=1e-6)
    assert len(blocks) == 12 and all(
        torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in zip(blocks, taken, strict=True)
    )


@mark.slow
def test_registers_are_no_patches():
    encoder = third_party_encoder("timm", "vit_medium_patch16_reg4_gap_256")
    assert encoder.blocks is None  # it has no class token
    model = timm.create_model("vit_medium_patch16_reg4_gap_256", pretrained=False)
    assert model.num_prefix_tokens == 4
    encoder = third_party_encoder("timm", "vit_betwixt_patch16_reg4_gap_256")
    x_BCHW = _images(256, 1)
    with torch.no_grad():
        copy = encoder.backbone().eval()
        token_BLD = copy.network.forward_features(x_BCHW)
        assert torch.allclose(encoder.poolings(x_BCHW)["mean"], token_BLD[:, 4:].mean(1), atol=1e-6)


@mark.parametrize(
    "name",
    [
        "resnet18",
        *(
            param(name, marks=mark.slow)
            for name in ("alexnet", "squeezenet1_1", "shufflenet_v2_x0_5")
        ),
    ],
)
def test_a_torchvision_convnet_gives_the_map_before_its_pooling(tmp_path, name):
    torch.manual_seed(4)
    more = {"num_classes": 5}
    model = torchvision.models.get_model(name, weights=None, **more).eval()
    file = _weights(model, tmp_path / "w.safetensors", prefix="module.")
    encoder = third_party_encoder("torchvision", name, file)
    x_BCHW = _images(224)
    with torch.no_grad():
        if name in ("alexnet", "squeezenet1_1"):
            map_BDHW = model.features(x_BCHW)
        else:
            taken = []
            last = model.layer4 if name == "resnet18" else model.conv5
            last.register_forward_hook(lambda *a: taken.append(a[2]))
            model(x_BCHW)
            map_BDHW = taken[0]
        found = encoder.poolings(x_BCHW)
    assert list(found) == ["mean", "2x2"] and encoder.family == "convnet" and encoder.blocks is None
    assert torch.allclose(found["mean"], map_BDHW.mean((2, 3)), atol=1e-5)
    side = -(-map_BDHW.shape[2] // 2)  # of an odd side both halves have the middle
    quarter = map_BDHW[:, :, -side:, :side].mean((2, 3))  # bottom left: the third
    width = map_BDHW.shape[1]
    assert torch.allclose(found["2x2"][:, 2 * width : 3 * width], quarter, atol=1e-5)


STAGES = {
    "timm:resnet18": ("layer1", "layer2", "layer3", "layer4"),
    "timm:tf_efficientnet_lite0": (*(f"blocks.{i}" for i in range(1, 7)), "bn2"),
    "timm:convnext_atto": ("stages.0", "stages.1", "stages.2", "stages.3"),
    "timm:test_vit": (*(f"blocks.{i}" for i in range(6)), "norm"),
    "torchvision:resnet18": ("layer1", "layer2", "layer3", "layer4"),
    "torchvision:mobilenet_v3_small": (*(f"features.{i}" for i in (1, 3, 6, 8, 11)), "features.12"),
    "torchvision:vit_b_32": (
        *(f"encoder.layers.encoder_layer_{i}" for i in range(12)),
        "encoder.ln",
    ),
}
"""Modules whose outputs are averaged: of at most a third of the image's resolution, the last one
twice as heavy.
"""


@mark.parametrize(
    "spec", [name if "resnet" in name else param(name, marks=mark.slow) for name in STAGES]
)
def test_stage_pooling_is_the_averages_of_the_stages_outputs(spec):
    """The oracle takes them by forward hooks from the library's own model."""
    encoder, (kind, name) = open_encoder(spec, image_size=64), spec.split(":")
    assert encoder.stages is not None
    x_BCHW, taken = _images(encoder.image_size), []
    torch.manual_seed(0)
    make = timm.create_model if kind == "timm" else torchvision.models.get_model
    model = make(name).eval()
    model.load_state_dict(
        {n.removeprefix("network."): t for n, t in encoder.state().items()}, strict=False
    )
    for part in STAGES[spec]:
        model.get_submodule(part).register_forward_hook(lambda *a: taken.append(a[2]))
    with torch.no_grad():
        (model.forward_features if kind == "timm" else model)(x_BCHW)
        found = encoder(x_BCHW, "stages")
    averages = [(t.mean((2, 3)),) if t.ndim == 4 else (t[:, 1:].mean(1), t[:, 0]) for t in taken]
    parts = [
        weight * x_BD / x_BD.norm(dim=1, keepdim=True)
        for i, both in enumerate(averages)
        for weight in [2.0 if i == len(averages) - 1 else 1.0]
        for x_BD in both
    ]
    row_BD = torch.cat(parts, dim=1)
    torch.testing.assert_close(found, row_BD / row_BD.norm(dim=1, keepdim=True))
    assert "stages" not in encoder.poolings(x_BCHW)


@mark.parametrize("name", ["googlenet", param("inception_v3", marks=mark.slow)])
def test_inputs_are_scaled_as_torchvision_scales_them_for_its_published_weights(
    tmp_path, monkeypatch, name
):
    torch.manual_seed(5)
    tensors = torchvision.models.get_model(
        name, weights=None, init_weights=False, aux_logits=True
    ).state_dict()
    monkeypatch.setattr(
        "torchvision.models._api.load_state_dict_from_url", lambda *a, **kw: tensors
    )
    published = torchvision.models.get_model(name, weights="DEFAULT").eval()
    save_file(tensors, tmp_path / "w.safetensors")
    encoder = third_party_encoder("torchvision", name, tmp_path / "w.safetensors")
    x_BCHW, taken = _images(encoder.image_size), []
    published.avgpool.register_forward_pre_hook(
        lambda module, given: taken.append(given[0].mean((2, 3)))
    )
    with torch.no_grad():
        found = encoder.poolings(x_BCHW)["mean"]
        published(x_BCHW)
        published.transform_input = False
        published(x_BCHW)
    torch.testing.assert_close(found, taken[0], rtol=1e-4, atol=1e-6)
    assert (found - taken[1]).abs().max() > 1e-3 * found.abs().max()


@mark.parametrize(
    ("name", "file_size", "size"),
    [("vit_h_14", None, 224), ("vit_h_14", 518, 518), ("vit_b_16", 384, 384), ("vit_b_16", 32, 32)],
)
def test_torchvisions_transformers_take_the_size_of_the_files_positions(name, file_size, size):
    """On the meta device: shapes without numbers."""
    with torch.device("meta"):
        weights = None
        if file_size is not None:
            tensors = torchvision.models.get_model(
                name, weights=None, image_size=file_size
            ).state_dict()
            weights = WeightsFile({f"module.{n}": t for n, t in tensors.items()}, ())
        encoder = encoder_from("torchvision", name, name, weights, "file", device="meta")
        assert encoder.image_size == size
        assert encoder.poolings(torch.zeros(2, 3, size, size))["cls"].shape == (
            2,
            1280 if name == "vit_h_14" else 768,
        )


def test_a_transformer_of_other_patches_is_refused_by_its_first_tensor():
    with torch.device("meta"):
        weights = WeightsFile(
            torchvision.models.get_model("vit_b_16", weights=None).state_dict(), ()
        )
        with raises(
            CheckpointError,
            match=r"conv_proj.weight=\(768, 3, 16, 16\); expected shape \(768, 3, 32, 32\)",
        ):
            encoder_from("torchvision", "vit_b_32", "x", weights, "file", device="meta")


@mark.slow
def test_preprocessing_is_the_librarys_own():
    vit, swin = third_party_encoder("timm", VIT), third_party_encoder("torchvision", "swin_t")
    assert vit.mean == timm.models.get_pretrained_cfg(VIT).mean
    assert (swin.mean, swin.family) == ((0.485, 0.456, 0.406), "transformer")
    assert third_party_encoder("timm", f"{VIT}.augreg_in21k").mean == (0.5, 0.5, 0.5)


@mark.parametrize("spec", ["timm:test_resnet", "torchvision:resnet18", "torchvision:vit_b_16"])
@mark.parametrize("size_px", [-5, 7, 4000])
def test_a_size_that_no_texture_has_is_refused_before_the_network_is_made(spec, size_px):
    """A head takes its centre from textures: without this check the refusal came after all features
    were computed.
    """
    rule = f"image_size={size_px}; expected 8 to 1024 pixels. Leave it out"
    with raises(ConfigError, match=rule):
        open_encoder(spec, image_size=size_px)
    with raises(ConfigError, match="textures"):
        textures(torch.arange(1), size_px)


@mark.slow
def test_sizes_are_free_where_the_model_lets_them_be():
    assert third_party_encoder("timm", VIT, image_size=32).image_size == 224
    small = third_party_encoder("torchvision", "resnet18", image_size=32)
    assert small.image_size == 32 and {
        n: f.shape for n, f in small.poolings(_images(32)).items()
    } == {"mean": (2, 512)}
    with raises(ConfigError, match="image_size=32"):
        third_party_encoder("torchvision", "alexnet", image_size=32)


@mark.slow
@mark.parametrize("spec", ["timm:resnet18", "torchvision:resnet18"])
def test_random_weights_are_the_same_each_time_and_leave_the_global_generator_alone(spec):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = open_encoder(spec, image_size=64), open_encoder(spec, image_size=64)
    assert torch.equal(before, torch.get_rng_state())
    x_BCHW = _images(64)
    assert torch.equal(first.poolings(x_BCHW)["mean"], second.poolings(x_BCHW)["mean"])
    assert "random weights" in first.name


@mark.parametrize("name", ["test_efficientnet", "test_resnet"])
def test_a_convnet_is_channels_last_with_the_same_features_and_weights(name):
    """An image's bits do not depend on its place, and the copy to train has the usual layout."""
    encoder = open_encoder(f"timm:{name}", image_size=64)
    network = encoder.network
    convs = [m.weight for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    wide = [w for w in convs if min(w.shape[1:]) > 1]
    assert wide and all(w.is_contiguous(memory_format=torch.channels_last) for w in wide)
    check_places(encoder, "mean", 32)
    plain = encoder.backbone()
    assert all(p.is_contiguous() for p in plain.parameters())
    assert all(torch.equal(v, plain.state_dict()[n]) for n, v in network.state_dict().items())
    x_BCHW = _images(64)
    with torch.no_grad():
        assert torch.allclose(plain.eval()(x_BCHW), encoder(x_BCHW), rtol=1e-4, atol=1e-6)


@mark.slow
@mark.parametrize("spec", ["timm:resnet18", "torchvision:resnet18", f"timm:{VIT}"])
def test_the_backbone_trains_and_leaves_the_frozen_encoder_as_it_was(spec):
    encoder = open_encoder(spec, image_size=64)
    x_BCHW = _images(encoder.image_size)
    before = encoder.poolings(x_BCHW)["mean"]
    assert not before.requires_grad
    backbone = encoder.backbone()
    assert torch.allclose(backbone.eval()(x_BCHW), before, atol=1e-5)
    optimizer = torch.optim.SGD(backbone.train().parameters(), lr=0.1)
    backbone(x_BCHW).square().mean().backward()
    assert all(
        p.grad is not None for n, p in backbone.named_parameters() if not n.endswith("cls_token")
    )
    optimizer.step()
    assert not torch.allclose(backbone.eval()(x_BCHW), before, atol=1e-5)
    assert torch.equal(encoder.poolings(x_BCHW)["mean"], before)


@mark.slow
def test_files_that_do_not_fit_are_refused_with_the_first_tensor(tmp_path):
    model = torchvision.models.resnet18(weights=None)
    small = model.state_dict()
    save_file(
        {n: t for n, t in small.items() if n != "layer2.0.bn1.bias"}, tmp_path / "lacks.safetensors"
    )
    save_file(small | {"layer4.0.conv1.weight": torch.ones(2)}, tmp_path / "shape.safetensors")
    save_file(small | {"layer5.0.weight": torch.ones(2)}, tmp_path / "more.safetensors")
    save_file(
        {f"{p}.{n}": t.clone() for n, t in small.items() for p in "qk"},
        tmp_path / "two.safetensors",
    )
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    expected = {
        "lacks": "layer2.0.bn1.bias=nothing",
        "shape": r"layer4.0.conv1.weight=\(2,\); expected shape \(512, 256, 3, 3\)",
        "more": "layer5.0.weight is not a tensor",
        "two": r"2 models, under \['k.', 'q.'\]",
        "other": "no tensor 'conv1.weight'",
    }
    for name, words in expected.items():
        with raises(CheckpointError, match=words):
            third_party_encoder("torchvision", "resnet18", tmp_path / f"{name}.safetensors")


def test_unknown_names_are_refused_with_the_closest():
    for kind, name, close in [
        ("timm", "resnet5O", "resnet50"),
        ("torchvision", "alexnt", "alexnet"),
        ("timm", f"{VIT}.no", "known tag"),
    ]:
        with raises(ConfigError, match=close):
            third_party_encoder(kind, name)
    with raises(ConfigError, match="expected one of its"):
        third_party_encoder("torchvision", "fcn_resnet50")  # it segments, it does not classify
