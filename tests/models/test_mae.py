"""The masked autoencoder: the paper's sizes to the unit, its loss against MAE's own, slower way,
its initialisation.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

from dpvision.config import MAEConfig, ViTConfig
from dpvision.errors import ConfigError
from dpvision.models import make_model
from dpvision.models.layers import patchify
from dpvision.models.mae import MAE, losses, reconstruct

CONFIG = MAEConfig(
    encoder=ViTConfig(image_size=16, patch_size=4, depth=2, width=24, num_heads=3),
    decoder_depth=2,
    decoder_width=16,
    decoder_num_heads=4,
)
# Depth, width, heads, trained parameters; counts of reference/model_sizes.csv (Large from its
# stated 24 x 1024, not the printed total).
PAPER = {
    "Nano": (12, 192, 3, 18_590_464),
    "Tiny": (12, 384, 6, 34_792_192),
    "Small": (12, 576, 9, 61_610_752),
    "Base": (12, 768, 12, 99_046_144),
    "Large": (24, 1024, 16, 316_629_760),
}


def make_mae(dtype=torch.float64) -> MAE:
    model = make_model(CONFIG, seed=0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model.to(dtype)


def images(num: int = 3, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x_BCHW = torch.randn(num, 3, 16, 16, generator=generator, dtype=torch.float64).to(dtype)
    return x_BCHW, torch.randint(0, 2**62, (num, 16), generator=generator)


@pytest.mark.parametrize("size", PAPER)
def test_trained_parameters_are_the_papers_to_the_unit(size):
    depth, width, num_heads, expected = PAPER[size]
    with torch.device("meta"):
        model = MAE(MAEConfig(encoder=ViTConfig(depth=depth, width=width, num_heads=num_heads)))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected


def slow_losses(model: MAE, x_BCHW: torch.Tensor, order_BL: torch.Tensor) -> torch.Tensor:
    """MAE's way: every patch embedded, tokens put back in raster order, every patch predicted,
    masked ones picked by a 0/1 mask.
    """
    results = []
    for x_CHW, order_L in zip(x_BCHW, order_BL, strict=True):
        encoder, patches = model.encoder, patchify(x_CHW[None], 4)
        shuffle = sorted(range(16), key=lambda i: order_L[i].item())
        seen, masked = shuffle[:4], shuffle[4:]
        embedded = F.conv2d(
            x_CHW[None],
            encoder.patch_embed.weight.view(-1, 3, 4, 4),
            encoder.patch_embed.bias,
            stride=4,
        )
        token = embedded.flatten(2).transpose(1, 2)[0] + encoder.position_LD
        latent = torch.cat([encoder.cls_token[None], token[seen]])[None]
        for block in encoder.blocks:
            latent = block(latent)
        latent = model.decoder_embed(encoder.norm(latent))[0]
        full = model.mask_token.repeat(16, 1)
        full[seen] = latent[1:]
        full = torch.cat([latent[:1], full + model.decoder_position_LD])[None]
        for block in model.decoder_blocks:
            full = block(full)
        prediction = model.head(model.decoder_norm(full))[0, 1:]
        mask = torch.zeros(16, dtype=x_BCHW.dtype)
        mask[masked] = 1
        error_L = (prediction - patches[0]).square().mean(-1)
        results.append((error_L * mask).sum() / mask.sum())
    return torch.stack(results)


def test_loss_and_gradient_equal_maes_own_way():
    model = make_mae()
    x_BCHW, order_BL = images()
    fast, slow = losses(model, x_BCHW, order_BL), slow_losses(model, x_BCHW, order_BL)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    params = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(fast.sum(), params),
        torch.autograd.grad(slow.sum(), params),
        rtol=1e-9,
        atol=1e-11,
    )


def test_encoder_does_not_see_masked_patches():
    model = make_mae()
    x_BCHW, order_BL = images(1)
    rank = order_BL.argsort(dim=1)
    seen, masked = rank[0, 0].item(), rank[0, 4].item()

    def prediction_after_change_at(patch):
        patches = patchify(x_BCHW, 4)
        if patch is not None:
            patches[0, patch] += 1.0
        return model(patches, rank)

    before = prediction_after_change_at(None)
    assert torch.equal(prediction_after_change_at(masked), before)
    assert not torch.equal(prediction_after_change_at(seen), before)


def test_only_masked_pixels_are_in_the_loss():
    model = make_mae()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    x_BCHW, order_BL = images(1)
    rank = order_BL.argsort(dim=1)[0]
    expected = patchify(x_BCHW, 4)[0, rank[4:]].square().mean()
    torch.testing.assert_close(losses(model, x_BCHW, order_BL)[0], expected)


def test_vmapped_gradients_equal_those_of_single_records():
    model = make_mae()
    x_BCHW, order_BL = images()

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x_CHW, order_L):
            return losses(self.model, x_CHW[None], order_L[None])[0]

    wrapped = Loss()
    params = {name: p.detach() for name, p in wrapped.named_parameters()}
    batched = vmap(grad(lambda p, x, o: functional_call(wrapped, p, (x, o))), in_dims=(None, 0, 0))(
        params, x_BCHW, order_BL
    )
    for i in range(3):
        single = torch.autograd.grad(
            losses(model, x_BCHW[i : i + 1], order_BL[i : i + 1]).sum(), list(model.parameters())
        )
        for (name, value), expected in zip(batched.items(), single, strict=True):
            torch.testing.assert_close(value[i], expected, rtol=1e-9, atol=1e-12, msg=name)


def test_forward_draws_nothing_and_losses_are_float32_under_autocast():
    model = make_mae(torch.float32)
    x_BCHW, order_BL = images(dtype=torch.float32)
    state = torch.get_rng_state()
    exact = losses(model, x_BCHW, order_BL)
    with torch.autocast("cpu", torch.bfloat16):
        rough = losses(model, x_BCHW, order_BL)
    assert torch.equal(torch.get_rng_state(), state)
    assert exact.dtype == rough.dtype == torch.float32 and not torch.equal(exact, rough)
    torch.testing.assert_close(rough, exact, rtol=2e-2, atol=0)


def test_reconstruction_keeps_visible_patches_and_has_the_losses_error():
    model = make_mae()
    x_BCHW, order_BL = images()
    prediction_BCHW, mask_BL = reconstruct(model, x_BCHW, order_BL)
    error_BL = (patchify(prediction_BCHW, 4) - patchify(x_BCHW, 4)).square().mean(-1)
    assert mask_BL.sum(1).tolist() == [12, 12, 12] and not error_BL[~mask_BL].any()
    torch.testing.assert_close(error_BL.sum(1) / 12, losses(model, x_BCHW, order_BL))
    assert all(mask_BL[i, order_BL[i].argmin()].item() is False for i in range(3))


def test_initialisation_is_the_papers():
    model = make_model(
        MAEConfig(encoder=ViTConfig(image_size=32, patch_size=4, depth=2, width=128, num_heads=4)),
        seed=3,
    )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            bound = math.sqrt(6 / (module.in_features + module.out_features))
            assert not module.bias.any() and module.weight.abs().max() <= bound, name
            assert abs(module.weight.std().item() * math.sqrt(3) / bound - 1) < 0.05, name
        if isinstance(module, torch.nn.LayerNorm):
            assert module.eps == 1e-6 and (module.weight == 1).all() and not module.bias.any(), name
    tokens = torch.cat([model.encoder.cls_token, model.mask_token])
    assert 0.8 < tokens.std().item() / 0.02 < 1.2


def test_weights_are_a_function_of_the_seed_alone():
    state = torch.get_rng_state()
    first = make_model(CONFIG, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again, other = make_model(CONFIG, seed=5).state_dict(), make_model(CONFIG, seed=6).state_dict()
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert not torch.equal(other["head.weight"], first["head.weight"])


def test_mask_that_leaves_nothing_to_see_is_refused():
    with pytest.raises(ConfigError, match=r"mask_ratio=0\.95 of 16 patches"):
        make_model(MAEConfig(encoder=CONFIG.encoder, mask_ratio=0.95), seed=0)
