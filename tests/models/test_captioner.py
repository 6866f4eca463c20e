"""The captioner and its warm start: the paper's sizes to the unit, torch's decoder layers as
oracle, causality, the cache, the losses.
"""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpvision.config import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    CaptionerConfig,
    CrossDecoderConfig,
    CrossMAEConfig,
    ViTConfig,
)
from dpvision.errors import ConfigError
from dpvision.models import count_parameters, make_model
from dpvision.models.captioner import Captioner, caption_losses, losses
from dpvision.models.cross_decoder import CrossDecoder
from dpvision.models.cross_mae import CrossMAE
from dpvision.models.cross_mae import losses as cross_mae_losses
from dpvision.models.layers import patchify
from dpvision.recipes import RECIPES

ENCODER = ViTConfig(
    image_size=16, patch_size=4, depth=2, width=24, num_heads=3, qkv_bias=False, train_cls=False
)
DECODER = CrossDecoderConfig(depth=2, width=16, num_heads=4)
CONFIG = CaptionerConfig(encoder=ENCODER, decoder=DECODER, vocab_size=11, num_tokens=7)
SIZES = Path(__file__).parents[3] / "shared" / "reference" / "model_sizes.csv"
# Trained parameters of the whole captioners and of Base's encoder: Sander et al. 2024, Table 6, to
# the unit.
PAPER = {"tiny": 59_365_434, "small": 115_685_562, "base": 189_774_138, "large": 407_376_954}


def _moved(model: nn.Module) -> nn.Module:
    """Every parameter away from its initial value, so that norms and biases count; float64."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return model.double()


def make_captioner(**changes: object) -> Captioner:
    model = _moved(make_model(replace(CONFIG, **changes), seed=0))
    assert isinstance(model, Captioner)
    return model


def images(num: int = 3) -> Tensor:
    return torch.randn(
        num, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def captions() -> Tensor:
    """Three captions of one, three and five words."""
    rows = [[BOS_ID, 4, EOS_ID], [BOS_ID, 9, 9, 3, EOS_ID], [BOS_ID, 5, 10, 6, 7, 8, EOS_ID]]
    return torch.tensor([row + [PAD_ID] * (7 - len(row)) for row in rows])


@pytest.mark.parametrize("size", PAPER)
def test_trained_parameters_are_the_papers_to_the_unit(size):
    model = RECIPES[f"dpcap.{size}"]().model
    assert isinstance(model, CaptionerConfig)
    assert count_parameters(model) == PAPER[size]


def test_our_copy_of_the_papers_counts_is_the_reference():
    if not SIZES.exists():
        pytest.skip("the reference table of model sizes is not here")
    rows = {
        row["model"]: int(row["exact_count"])
        for row in csv.DictReader(SIZES.open())
        if row["part"].startswith("whole")
    }
    assert {f"DP-Cap-{size.capitalize()}": count for size, count in PAPER.items()} == {
        k: v for k, v in rows.items() if "Cap" in k
    }


def torch_decoder(ours: CrossDecoder) -> nn.ModuleList:
    """torch's own decoder layers with our weights."""
    layers = nn.ModuleList()
    for block in ours.blocks:
        width = ours.cfg.width
        layer = nn.TransformerDecoderLayer(
            width, ours.cfg.num_heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        ).double()
        with torch.no_grad():
            for bias in (
                layer.self_attn.in_proj_bias,
                layer.multihead_attn.in_proj_bias,
                layer.self_attn.out_proj.bias,
            ):
                bias.zero_()
            for bias in (
                layer.multihead_attn.out_proj.bias,
                layer.linear1.bias,
                layer.linear2.bias,
            ):
                bias.zero_()
            layer.self_attn.in_proj_weight.copy_(block.self_attention.qkv.weight)
            layer.self_attn.out_proj.weight.copy_(block.self_attention.out.weight)
            layer.multihead_attn.in_proj_weight.copy_(
                torch.cat([block.cross_attention.q.weight, block.cross_attention.kv.weight])
            )
            layer.multihead_attn.out_proj.weight.copy_(block.cross_attention.out.weight)
            layer.linear1.weight.copy_(block.mlp[0].weight)
            layer.linear2.weight.copy_(block.mlp[2].weight)
        for name in ("norm1", "norm2", "norm3"):
            getattr(layer, name).load_state_dict(getattr(block, name).state_dict())
        layers.append(layer)
    return layers.eval()


def slow_logits(model: Captioner, x_BCHW: Tensor, token_BL: Tensor) -> Tensor:
    """The captioner with torch's decoder layers and torch's causal mask."""
    token_BSE = model.encoder(x_BCHW)
    grid = torch.cat([torch.zeros(1, 16), model.decoder.position_LD])
    memory = F.linear(token_BSE, model.decoder.bridge.weight, model.decoder.bridge.bias) + grid
    x = model.word_embed.weight[token_BL] + model.word_position_LD[: token_BL.shape[1]]
    mask = nn.Transformer.generate_square_subsequent_mask(token_BL.shape[1], dtype=torch.float64)
    for layer in torch_decoder(model.decoder):
        x = layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
    return model.word_head(model.word_norm(x))


def test_decoder_equals_torchs_own_layers():
    model, x, token = make_captioner(), images(), captions()
    assert torch.allclose(
        model.logits(model.decode(token, model.encode(x))), slow_logits(model, x, token), atol=1e-10
    )


def test_loss_is_the_mean_over_a_records_own_words_end_included():
    model, x, token = make_captioner(), images(), captions()
    expected = []
    for b, words in enumerate((2, 4, 6)):  # words and EOS
        logits = slow_logits(model, x[b : b + 1], token[b : b + 1, : words + 1])[0, :words]
        expected.append(F.cross_entropy(logits, token[b, 1 : words + 1]))
    assert torch.allclose(losses(model, x, token), torch.stack(expected), atol=1e-10)


def test_a_word_depends_on_no_later_one():
    model, x, token = make_captioner(), images(1), captions()[2:]
    hidden = model.decode(token, model.encode(x))
    for place in range(1, 7):
        other = token.clone()
        other[:, place] = 3
        changed = (model.decode(other, model.encode(x)) != hidden).any(-1)[0]
        assert not changed[:place].any()
        assert changed[place:].all() == bool(other[0, place] != token[0, place])


def test_the_image_counts_in_every_word():
    model, token = make_captioner(), captions()[:2]
    first, second = images(2)
    same = model.decode(token, model.encode(torch.stack([first, first])))
    other = model.decode(token, model.encode(torch.stack([second, first])))
    assert (same[0] != other[0]).any(-1).all()
    assert torch.equal(same[1], other[1])


def test_words_one_by_one_from_the_cache_equal_the_whole_caption():
    model, x, token = make_captioner(), images(), captions()
    memory = model.encode(x)
    whole = model.logits(model.decode(token, memory))
    cache = model.start_cache(memory)
    for place in range(token.shape[1]):
        logits, cache = model.step(token[:, place], cache)
        assert torch.allclose(logits, whole[:, place], atol=1e-10)


def test_a_row_of_padding_costs_nothing_and_moves_nothing():
    model, x = make_captioner(), images(2)
    token = torch.stack([captions()[1], torch.full((7,), PAD_ID)])
    loss = losses(model, x, token)
    assert loss[1] == 0 and loss[0] > 0
    grads = torch.autograd.grad(
        loss[1], [p for p in model.parameters() if p.requires_grad], allow_unused=True
    )
    assert all(g is None or not g.any() for g in grads)


def test_a_record_in_parallel_sees_no_words_and_leaves_others_alone():
    model, x, token = make_captioner(parallel_rate=0.5), images(), captions()
    parallel = torch.tensor([False, True, False])
    memory = model.encode(x)
    hidden = model.decode(token, memory, parallel)
    other = token.clone()
    other[1, 1:] = 3
    assert torch.equal(model.decode(other, memory, parallel), hidden)
    assert torch.allclose(hidden[[0, 2]], model.decode(token, memory)[[0, 2]], atol=1e-12)
    # every hidden word sees every other: even the first place depends on how many there are
    short = model.decode(token[:, :4], memory, parallel)
    assert not torch.allclose(short[1], hidden[1, :4], atol=1e-3)
    assert torch.allclose(short[0], hidden[0, :4], atol=1e-12)


def test_the_second_loss_is_the_warm_starts_own():
    model, x, token = make_captioner(reconstruction_weight=0.3), images(), captions()
    order = torch.randint(0, 2**62, (3, 16), generator=torch.Generator().manual_seed(2))
    warm = make_model(CrossMAEConfig(encoder=ENCODER, decoder=DECODER), seed=5).double()
    warm.load_state_dict(
        {
            k: v
            for k, v in model.state_dict().items()
            if k.split(".")[0] in ("encoder", "decoder", "patch_head")
        }
    )
    expected = caption_losses(model, model.encode(x), token) + 0.3 * cross_mae_losses(
        warm, x, order
    )
    assert torch.allclose(losses(model, x, token, order_BL=order), expected, atol=1e-12)


def test_warm_start_equals_torchs_layers_over_the_hidden_patches():
    model = _moved(make_model(CrossMAEConfig(encoder=ENCODER, decoder=DECODER), seed=0))
    assert isinstance(model, CrossMAE)
    x, order = (
        images(),
        torch.randint(0, 2**62, (3, 16), generator=torch.Generator().manual_seed(2)),
    )
    expected = []
    for x_CHW, order_L in zip(x, order, strict=True):
        shuffle = order_L.argsort()
        seen, hidden = shuffle[:4], shuffle[4:]
        patches = patchify(x_CHW[None], 4)[0]
        token = model.encoder.patch_embed(patches) + model.encoder.position_LD
        latent = model.encoder.encode(torch.cat([model.encoder.cls_token[None], token[seen]])[None])
        memory = model.decoder.bridge(latent) + torch.cat(
            [torch.zeros(1, 16), model.decoder.position_LD[seen]]
        )
        query = (model.patch_head.mask_token + model.decoder.position_LD[hidden])[None]
        for layer in torch_decoder(model.decoder):
            query = layer(query, memory)
        expected.append((model.patch_head.linear(query)[0] - patches[hidden]).square().mean())
    assert torch.allclose(cross_mae_losses(model, x, order), torch.stack(expected), atol=1e-10)


def test_tokens_of_class_and_mask_are_not_trained_and_not_zero():
    for cfg in (CONFIG, CrossMAEConfig(encoder=ENCODER, decoder=DECODER)):
        model = make_model(cfg, seed=0)
        fixed = {name for name, p in model.named_parameters() if not p.requires_grad}
        assert fixed == {"encoder.cls_token"} | (
            {"patch_head.mask_token"} if isinstance(model, CrossMAE) else set()
        )
        assert all(dict(model.named_parameters())[name].any() for name in fixed)


def test_a_frozen_encoder_has_no_trained_part():
    model = make_captioner(train_encoder=False)
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"decoder", "word_embed", "word_norm", "word_head"}


def test_word_embeddings_start_as_wide_as_positions():
    """N(0, 1), as in DP-Cap: the standard deviation of half a million draws is within a percent of
    1.
    """
    model = make_model(replace(CONFIG, vocab_size=30_522), seed=0)
    assert abs(model.word_embed.weight.std().item() - 1) < 0.01


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: replace(CONFIG, num_tokens=2), "num_tokens"),
        (lambda: replace(CONFIG, vocab_size=3), "vocab_size"),
        (lambda: replace(CONFIG, parallel_rate=float("nan")), "parallel_rate"),
        (lambda: replace(DECODER, num_heads=3), "width"),
        (
            lambda: make_model(
                CrossMAEConfig(encoder=ENCODER, decoder=DECODER, mask_ratio=0.99), seed=0
            ),
            "mask_ratio",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(make, name):
    with pytest.raises(ConfigError, match=name):
        make()
