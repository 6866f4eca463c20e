"""Files in the layouts of ViP, masked autoencoders and DP-Cap against their networks by explicit
products of matrices (``paper_files``), and what is refused.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from dpvision.config import PAD_ID, CaptionerConfig, MAEConfig, from_dict
from dpvision.encoders.open import open_encoder
from dpvision.encoders.papers import MEAN, PUBLISHED, STD, paper_checkpoint
from dpvision.encoders.released import released_encoder
from dpvision.errors import CheckpointError, ConfigError, DataError
from dpvision.eval.dense.dense_vit import dense_backbone
from dpvision.models import make_model
from dpvision.models.captioner import losses as caption_losses
from dpvision.models.mae import losses as mae_losses
from dpvision.recipes import RECIPES

from . import paper_files as files

DPCAP = {"tiny": (384, 384), "small": (576, 576), "base": (768, 768), "large": (1024, 768)}


def _images(num: int, side: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num, 3, side, side, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("decoder", [None, 16])
@pytest.mark.parametrize("kind", ["vip", "mae"])
def test_an_encoder_gives_the_features_of_its_layout(tmp_path, kind, decoder, trained):
    tensors = files.mae_file(decoder=decoder, trained=trained)
    files.write(tmp_path / "a.safetensors", tensors)
    encoder = open_encoder(f"{kind}:{tmp_path / 'a.safetensors'}@heads=3")
    assert (encoder.name, encoder.image_size, encoder.family) == (
        f"{kind}:a.safetensors",
        12,
        "transformer",
    )
    assert encoder.mean == (0.485, 0.456, 0.406) and encoder.std == (0.229, 0.224, 0.225)
    x_BCHW = _images(4, 12)
    *truth, last_BLD = files.encoder_blocks(files.double(tensors), x_BCHW, num_heads=3)
    assert last_BLD.std() > 0.1
    with torch.no_grad():
        found = encoder.poolings(x_BCHW.float())["mean"].double()
        for ours, theirs in zip(encoder.blocks(x_BCHW.float()), truth, strict=True):
            torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)
        copied = encoder.backbone().eval().double().output(x_BCHW)
    torch.testing.assert_close(found, last_BLD[:, 1:].mean(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(copied, last_BLD, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["vip", "dpcap"])
def test_detection_and_segmentation_start_from_the_same_blocks_and_positions(tmp_path, kind):
    tensors = files.mae_file(trained=True) if kind == "vip" else files.dpcap_file()
    files.write(tmp_path / "a.safetensors", tensors)
    dense = dense_backbone(open_encoder(f"{kind}:{tmp_path / 'a.safetensors'}@heads=3,4"))
    x_BCHW = _images(2, 12)
    truth = files.encoder_blocks(files.double(tensors), x_BCHW, num_heads=3)[1][:, 1:]
    with torch.no_grad():
        (found,) = dense.double().eval()(x_BCHW, (1,))
    torch.testing.assert_close(found.flatten(2).transpose(1, 2), truth, atol=1e-6, rtol=0)
    assert dense.position_LD.requires_grad


@pytest.mark.parametrize("trained", [False, True])
def test_a_masked_autoencoder_gives_the_losses_of_its_layout(tmp_path, trained):
    tensors = files.mae_file(trained=trained)
    files.write(tmp_path / "a.safetensors", tensors)
    checkpoint = paper_checkpoint("vip", f"{tmp_path / 'a.safetensors'}@heads=3,2")
    cfg = from_dict(MAEConfig, checkpoint.manifest["config"]["model"])
    assert cfg.encoder.positions == ("loaded" if trained else "fixed")
    model = make_model(cfg, 0)
    model.load_state_dict(checkpoint.model)
    x_BCHW = _images(3, 12)
    noise_BL = torch.rand(3, 9, generator=torch.Generator().manual_seed(1))
    theirs = files.mae_losses(files.double(tensors), x_BCHW, noise_BL, 3, 2, visible=2)
    with torch.no_grad():
        ours = mae_losses(model.double(), x_BCHW, noise_BL)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_a_captioner_gives_the_losses_and_features_of_its_layout(tmp_path):
    tensors = files.dpcap_file()
    files.write(tmp_path / "a.safetensors", tensors)
    checkpoint = paper_checkpoint("dpcap", f"{tmp_path / 'a.safetensors'}@heads=3,4")
    model = make_model(from_dict(CaptionerConfig, checkpoint.manifest["config"]["model"]), 0)
    model.load_state_dict(checkpoint.model)
    x_BCHW = _images(3, 12)
    bert_BL = torch.tensor(
        [[101, 1, 120, 102, 0, 0], [101, 7, 2, 129, 102, 0], [101, 103, 1, 2, 101, 102]]
    )  # the entries 1, 2 and 101 as words, too
    ours_BL = bert_BL.clone()
    for theirs, mine in ((101, 1), (102, 2), (1, 101), (2, 102)):
        ours_BL[bert_BL == theirs] = mine
    truth_B = files.caption_losses(files.double(tensors), x_BCHW, bert_BL, 3, 4)
    with torch.no_grad():
        found_B = caption_losses(model.double(), x_BCHW, ours_BL)
    torch.testing.assert_close(found_B, truth_B, atol=1e-6, rtol=0)
    assert truth_B.std() > 0.01 and PAD_ID == 0

    encoder = open_encoder(f"dpcap:{tmp_path / 'a.safetensors'}@heads=3,4")
    last_BLD = files.encoder_blocks(files.double(tensors), x_BCHW, num_heads=3)[-1]
    bridge_BD = last_BLD.mean(1) @ tensors["decoder_embed.weight"].double().T
    bridge_BD += tensors["decoder_embed.bias"] + tensors["decoder_image_type_embedding"][0]
    with torch.no_grad():
        found = encoder.poolings(x_BCHW.float())
    torch.testing.assert_close(found["mean"].double(), last_BLD[:, 1:].mean(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(found["bridge"].double(), bridge_BD, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "name", "width", "heads"),
    [
        ("mae", "base", 768, 12),
        ("mae", "large", 1024, 16),
        ("mae", "huge", 1280, 16),
        ("vip", "nano", 192, 12),
        ("vip", "tiny", 384, 12),
        ("vip", "small", 576, 12),
        ("vip", "base", 768, 12),
        ("vip", "large", 1024, 16),
    ],
)
def test_published_encoders_have_their_published_heads(tmp_path, kind, name, width, heads):
    """A width of 1280 has heads of 80 (He et al. 2022), and ViP's small encoders have 12 heads;
    compared with timm's network.
    """
    generator = torch.Generator().manual_seed(5)
    model = VisionTransformer(
        img_size=8,
        patch_size=4,
        embed_dim=width,
        depth=1,
        num_heads=heads,
        num_classes=0,
        global_pool="token",
        mlp_ratio=1,
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
    )
    for name_of, parameter in model.named_parameters():
        parameter.data = width**-0.5 * 2 * torch.randn(parameter.shape, generator=generator)
        parameter.data += float("norm" in name_of and "weight" in name_of)
    model.pos_embed.data = files.square_table(2, width)
    files.write(tmp_path / "published.safetensors", model.state_dict())
    x_BCHW = torch.randn(2, 3, 8, 8, generator=generator)
    with torch.no_grad():
        (truth_BLD,) = model.eval().forward_intermediates(
            x_BCHW, intermediates_only=True, output_fmt="NLC"
        )
        for end in ("", f"@{name}", f"@heads={heads}"):
            (found_BLD,) = open_encoder(f"{kind}:{tmp_path / 'published.safetensors'}{end}").blocks(
                x_BCHW
            )
            torch.testing.assert_close(found_BLD[:, 1:], truth_BLD, atol=1e-4, rtol=1e-4)
        wrong = 8 if heads != 8 else 4
        (other_BLD,) = open_encoder(
            f"{kind}:{tmp_path / 'published.safetensors'}@heads={wrong}"
        ).blocks(x_BCHW)
    assert (other_BLD[:, 1:] - truth_BLD).abs().max() > 0.01, "heads matter"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in DPCAP])
def test_the_four_captioners_have_their_published_heads(tmp_path, name):
    width, decoder = DPCAP[name]
    heads = {"tiny": (6, 6), "small": (12, 12), "base": (12, 12), "large": (16, 12)}[name]
    tensors = files.dpcap_file(width=width, decoder=decoder, depth=1, decoder_depth=1, grid=2)
    files.write(tmp_path / "a.safetensors", tensors)
    bert_BL = torch.tensor([[101, 1, 120, 102], [101, 7, 102, 0]])
    x_BCHW = _images(2, 8)
    checkpoint = paper_checkpoint("dpcap", str(tmp_path / "a.safetensors"))
    model = make_model(from_dict(CaptionerConfig, checkpoint.manifest["config"]["model"]), 0)
    model.load_state_dict(checkpoint.model)
    ours_BL = torch.tensor([[1, 101, 120, 2], [1, 7, 2, 0]])
    with torch.no_grad():
        found_B = caption_losses(model.double(), x_BCHW, ours_BL)
    truth_B = files.caption_losses(files.double(tensors), x_BCHW, bert_BL, *heads)
    torch.testing.assert_close(found_B, truth_B, atol=1e-6, rtol=0)


def test_what_is_no_masked_autoencoder_is_refused_with_the_first_tensor(tmp_path):
    good = files.mae_file(width=768, depth=2)
    cases = {
        "norm": ({n: t for n, t in good.items() if n != "norm.weight"}, "norm.weight=nothing"),
        "block": (
            good | {"blocks.1.attn.qkv.weight": torch.ones(3, 3)},
            r"blocks.1.attn.qkv.weight=\(3, 3\); expected shape \(2304, 768\)",
        ),
        "more": (
            good | {"blocks.1.ls1.gamma": torch.ones(3)},
            "blocks.1.ls1.gamma is not a tensor",
        ),
        "gap": (
            {n.replace("blocks.1.", "blocks.2."): t for n, t in good.items()},
            "blocks.1.*=nothing",
        ),
        "oblong": (good | {"pos_embed": torch.zeros(1, 11, 768)}, "expected RGB, square patches"),
        "flat": (
            good | {"pos_embed": torch.zeros(10, 768)},
            r"pos_embed=\(10, 768\); expected 3 dimensions",
        ),
        "other": ({"conv1.weight": torch.ones(2)}, "no tensor 'patch_embed.proj.weight'"),
        "no blocks": (
            {n: t for n, t in good.items() if not n.startswith("blocks")},
            "mlp.fc1.weight=nothing",
        ),
        "captioner": (files.dpcap_file(width=768), r"blocks.0.attn.qkv.bias=nothing"),
    }
    for name, (tensors, words) in cases.items():
        files.write(tmp_path / f"{name}.safetensors", tensors)
        with pytest.raises(CheckpointError, match=words):
            released_encoder("mae", str(tmp_path / f"{name}.safetensors"))
    with pytest.raises(ConfigError, match="expected vip, mae, dpcap, simclr or tan"):
        released_encoder("dino", str(tmp_path / "block.safetensors"))


def test_what_is_no_captioner_is_refused_with_the_first_tensor(tmp_path):
    good = files.dpcap_file(width=384, decoder=384, depth=1, decoder_depth=1)
    words = tmp_path / "bpe.txt"
    words.write_text("[PAD]\n" * 200)
    cases = {
        "mae": (files.mae_file(width=384), "text_embedding_layer_SimVLM.weight=nothing"),
        "trained": (
            good | {"pos_embed": good["pos_embed"] + 0.1},
            "pos_embed differs from the fixed sin-cos table",
        ),
        "words": (
            good | {"text_decoder_pos_embed": good["text_decoder_pos_embed"] + 0.1},
            "text_decoder_pos_embed differs",
        ),
        "bias": (
            good | {"blocks.0.attn.qkv.bias": torch.zeros(3 * 384)},
            "blocks.0.attn.qkv.bias is not a tensor of this model",
        ),
        "small": (
            files.dpcap_file(width=384, decoder=384, vocab_size=90),
            "90 entries in the vocabulary; expected BERT's 30,522",
        ),
        "width": (
            files.dpcap_file(width=384, decoder=576),
            r"width=384, 576; expected .*\(tiny, small, base, large\).*@heads=N,M",
        ),
    }
    for name, (tensors, said) in cases.items():
        files.write(tmp_path / f"{name}.safetensors", tensors)
        with pytest.raises(CheckpointError, match=said):
            open_encoder(f"dpcap:{tmp_path / name}.safetensors")
    good_file = files.write(tmp_path / "good.safetensors", good)
    with pytest.raises(DataError, match=r"line 101 is not \[UNK\].*vocab.txt of bert-base-uncased"):
        paper_checkpoint("dpcap", f"{good_file}@{words}")
    longer = files.write_vocabulary(tmp_path / "longer.txt", [], 140)
    with pytest.raises(CheckpointError, match=r"WordPiece of 140 entries; expected .* of 130"):
        paper_checkpoint("dpcap", f"{good_file}@{longer}")


@pytest.mark.parametrize(
    ("kind", "end", "error", "words"),
    [
        ("vip", "", CheckpointError, r"width=24; expected .*\(nano, .*large\).*@heads=N\."),
        ("vip", "@huge", ConfigError, "'huge'; expected one of nano, tiny, small, base, large"),
        ("mae", "@base", CheckpointError, "width=24; expected 768 of mae:FILE@base"),
        ("mae", "@heads=0", ConfigError, "expected heads=N for the encoder"),
        ("mae", "@heads=x", ConfigError, "expected heads=N for the encoder"),
        ("mae", "@heads=1,2,3", ConfigError, "expected heads=N for the encoder"),
        ("mae", "@heads=5", ConfigError, "num_heads=5; expected a divisor of width=24"),
        ("mae", "@heads=3@heads=4", ConfigError, "second heads"),
        ("mae", "@vocab.txt", ConfigError, "'vocab.txt'; expected one of base, large, huge"),
        ("dpcap", "@vocab.txt", ConfigError, "an existing file, the vocabulary"),
    ],
)
def test_heads_are_asked_for_and_a_wrong_answer_is_refused(tmp_path, kind, end, error, words):
    file = files.write(tmp_path / "a.safetensors", files.mae_file())
    with pytest.raises(error, match=words):
        open_encoder(f"{kind}:{file}{end}")


def test_a_decoder_of_another_width_needs_its_heads_only_where_it_is_used(tmp_path):
    file = files.write(tmp_path / "a.safetensors", files.mae_file(width=192))
    open_encoder(f"vip:{file}")
    with pytest.raises(CheckpointError, match=r"width=192, 16;.*encoder and decoder.*@heads=N,M"):
        paper_checkpoint("vip", str(file))
    cfg = paper_checkpoint("vip", f"{file}@heads=6,2").manifest["config"]["model"]
    assert (cfg["encoder"]["num_heads"], cfg["decoder_num_heads"]) == (6, 2)


def test_a_file_whose_name_has_an_at_sign_is_opened(tmp_path):
    file = files.write(tmp_path / "me@base.safetensors", files.mae_file(width=192))
    assert open_encoder(f"vip:{file}").name == "vip:me@base.safetensors"
    assert open_encoder(f"vip:{file}@heads=3").name == "vip:me@base.safetensors"


def test_a_truncated_and_a_hostile_file_are_refused(tmp_path):
    whole = files.write(tmp_path / "a.pth", files.mae_file(width=192)).read_bytes()
    (tmp_path / "cut.pth").write_bytes(whole[: len(whole) // 2])

    class Hostile:
        def __reduce__(self):
            return Path.write_text, (tmp_path / "harmed", "")

    torch.save({"model": files.mae_file(width=192), "args": Hostile()}, tmp_path / "bad.pth")
    for name in ("cut.pth", "bad.pth"):
        with pytest.raises(CheckpointError, match=f"{name} was refused"):
            open_encoder(f"vip:{tmp_path / name}")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_kind_counts_only_before_a_colon(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="expected a run folder"):
        open_encoder(kind)
    Path(kind).mkdir()
    with pytest.raises(CheckpointError, match=f"none in {kind}; expected a run folder"):
        open_encoder(kind)
    with pytest.raises(ConfigError, match=f"expected {kind}:FILE"):
        open_encoder(f"{kind}:")


@pytest.mark.parametrize(("kind", "size"), [(k, s) for k in ("vip", "dpcap") for s in PUBLISHED[k]])
def test_a_recipe_of_each_size_can_start_from_its_published_file(kind, size):
    """Heads, widths and normalisation are what a run compares; depths show in the tensors."""
    config = RECIPES[f"{kind}.{size}"]()
    encoder = config.model.encoder
    decoder = (
        (config.model.decoder_width, config.model.decoder_num_heads)
        if kind == "vip"
        else (config.model.decoder.width, config.model.decoder.num_heads)
    )
    assert PUBLISHED[kind][size] == ((encoder.width, encoder.num_heads), decoder)
    assert (config.data.mean, config.data.std) == (MEAN, STD)
    assert (encoder.qkv_bias, encoder.positions) == (kind == "vip", "fixed")
