"""A captioner in the shape of DP-Cap, to measure with; not a recipe: nothing here is trained to be used.

Encoder: dpvision's ViT, 197 tokens at 224 px. Decoder as DP-Cap's in what costs time (Sander et al., ICML 2024, Table 6 and appendix A.1):
six blocks of causal self-attention, full attention on the encoder's tokens and an MLP, 40 tokens of a vocabulary of 30,522, a head that is
not tied. Unlike DP-Cap's: LayerNorm before each part, biases everywhere but in the head, learned positions, the class token trained.

Legend: B records, V views or (in ``_VD``) words, L caption tokens, S encoder tokens, D width, H heads, K head width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.config import ViTConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import LossFn
from dpvision.models.vit import ViT

try:
    from dpvision.models.head import linear_cross_entropy
except ImportError:  # the plain form below gives the same losses
    linear_cross_entropy = None

VOCABULARY = 30_522
NUM_TOKENS = 40
DECODER_DEPTH = 6
_MAX_DECODER_WIDTH = 768
"""DP-Cap-Large has a decoder of this width under an encoder of 1024; in the other sizes the two are equal."""
_HEAD_WIDTH = 64

_GPUS, _EPOCHS = 128, 32
_DAYS = {
    ("large", "functorch"): 61.0,
    ("large", "ghost norm"): 3.3 * 13.0,
    ("large", "ghost norm + AMP"): 13.0,
    ("base", "as trained"): 5.0,
}
"""Days of DP-Cap's 32 epochs of 233 M pairs on 128 V100 (32 GB). Its figure 4 is a drawing; these are from the text beside it (61 days; 13
days, a speedup of 3.3 over ghost norm alone) and from appendix A.2 (Base)."""
_LARGEST_BATCH = {
    "functorch": {"tiny": 36, "small": 20, "base": 12, "large": 5},
    "ghost norm": {"tiny": 350, "small": 230, "base": 180, "large": 64},
    "ghost norm + AMP": {"tiny": 420, "small": 310, "base": 225, "large": 90},
}
"""Records, one V100 with 32 GB: DP-Cap, Table 1."""


class Attention(nn.Module):
    """Multi-head attention of tokens to a memory, with separate projections; written out, so that ``vmap`` runs it batched."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = width // _HEAD_WIDTH
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x_BLD: Tensor, memory_BSD: Tensor, seen_LS: Tensor | None = None) -> Tensor:
        """Memory mixed for every token, (B, L, D); with ``seen_LS`` (bool), token l sees only what is True in its row."""
        q_BHLK, k_BHSK, v_BHSK = (
            part.unflatten(-1, (self.num_heads, _HEAD_WIDTH)).transpose(1, 2)
            for part in (self.q(x_BLD), self.k(memory_BSD), self.v(memory_BSD))
        )
        score_BHLS = q_BHLK * _HEAD_WIDTH**-0.5 @ k_BHSK.transpose(-2, -1)
        if seen_LS is not None:
            score_BHLS = score_BHLS.masked_fill(~seen_LS, -torch.inf)
        mixed_BHLK = score_BHLS.softmax(dim=-1) @ v_BHSK
        return self.out(mixed_BHLK.transpose(1, 2).flatten(2))


class DecoderBlock(nn.Module):
    """Pre-LayerNorm block: causal self-attention, attention to the picture, MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.self_attention, self.cross_attention = Attention(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BLD: Tensor, memory_BSD: Tensor, seen_LL: Tensor) -> Tensor:
        """Tokens after the three parts, (B, L, D)."""
        normed_BLD = self.norm1(x_BLD)
        x_BLD = x_BLD + self.self_attention(normed_BLD, normed_BLD, seen_LL)
        x_BLD = x_BLD + self.cross_attention(self.norm2(x_BLD), memory_BSD)
        return x_BLD + self.mlp(self.norm3(x_BLD))


class Captioner(nn.Module):
    """Picture encoder and caption decoder over one vocabulary.

    Positions are an embedding of the indices, of shape (B, L): as a bare parameter, Opacus could not train them.
    """

    seen_LL: Tensor

    def __init__(self, cfg: ViTConfig) -> None:
        super().__init__()
        width = min(cfg.width, _MAX_DECODER_WIDTH)
        self.encoder = ViT(cfg)
        self.bridge = nn.Linear(cfg.width, width)
        self.token_embed = nn.Embedding(VOCABULARY, width)
        self.position_embed = nn.Embedding(NUM_TOKENS, width)
        self.decoder_blocks = nn.ModuleList(DecoderBlock(width) for _ in range(DECODER_DEPTH))
        self.decoder_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("seen_LL", torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x_BCHW: Tensor, token_BL: Tensor) -> Tensor:
        """What the head gets to predict the token after each of ``token_BL``, (B, L, D), L at most NUM_TOKENS."""
        memory_BSD = self.bridge(self.encoder(x_BCHW))
        length = token_BL.shape[1]
        # Contiguous, both kinds of index: Opacus' ghost norm of an embedding takes a view of them.
        position_BL = torch.arange(length, device=token_BL.device).expand_as(token_BL).contiguous()
        x_BLD = self.token_embed(token_BL) + self.position_embed(position_BL)
        for block in self.decoder_blocks:
            x_BLD = block(x_BLD, memory_BSD, self.seen_LL[:length, :length])
        return self.decoder_norm(x_BLD)


def make_captioner(cfg: ViTConfig, seed: int) -> Captioner:
    """A captioner over the encoder of ``cfg`` with torch's own initialisation, a function of ``seed`` alone; float32, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Captioner(cfg)


def caption_losses(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    """Mean cross-entropy of each record's next tokens, the logits held in full.

    Returns:
        losses_B, float32.
    """
    hidden_BLD, target_BL = _hidden_and_target(model, batch)
    logit_BLV = model.head(hidden_BLD)
    return F.cross_entropy(logit_BLV.flatten(0, 1).float(), target_BL.flatten(), reduction="none").view(target_BL.shape).mean(1)


def fused_caption_losses(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    """The same losses, head and cross-entropy in one: all logits are never held at once."""
    hidden_BLD, target_BL = _hidden_and_target(model, batch)
    return linear_cross_entropy(hidden_BLD, model.head.weight, None, target_BL).float().mean(1)


def make_batch(num_records: int, device: torch.device) -> Batch:
    """Random pictures of 224 px and captions, the same at every call, made on the device."""
    generator = torch.Generator(device).manual_seed(0)
    ids_B = torch.arange(1, num_records + 1, device=device)
    image_BVCHW = torch.randn(num_records, 1, 3, 224, 224, device=device, generator=generator)
    token_BVL = torch.randint(VOCABULARY, (num_records, 1, NUM_TOKENS), device=device, generator=generator)
    return Batch(ids_B, torch.ones_like(ids_B, dtype=torch.bool), image_BVCHW, token_BVL)


def loss_forms() -> dict[str, LossFn]:
    """The forms of the vocabulary head that can run here, by name: "plain", and "fused" where dpvision has it."""
    return {"plain": caption_losses} | ({"fused": fused_caption_losses} if linear_cross_entropy else {})


def _hidden_and_target(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    assert isinstance(model, Captioner) and batch.token_BVL is not None
    token_BL = batch.token_BVL[:, 0]
    return model(batch.image_BVCHW[:, 0], token_BL[:, :-1].contiguous()), token_BL[:, 1:]


def render_beside_dpcap(rows: Sequence[dict[str, Any]], hardware: str) -> str:
    """Our GPU hours for an epoch and largest batches of the captioners, above the figures that DP-Cap prints.

    Args:
        rows: of a result (``common.row``).
        hardware: what ours ran on.
    """
    lines = [f"{'':<40} {'GPU hours, 233 M pairs':>22} {'largest batch':>14}"]
    for size in ("tiny", "small", "base", "large"):
        ours: dict[str, dict[str, float]] = {}
        for r in rows:
            if r["case"] == f"cap_{size}" and r["metric"] in ("gpu_hours_per_epoch", "max_physical_batch"):
                ours.setdefault(r["variant"], {})[r["metric"]] = r["value"]
        lines += [
            _line(f"{size:<6} here: {variant}", found.get("gpu_hours_per_epoch"), found.get("max_physical_batch"))
            for variant, found in ours.items()
        ]
        methods = [*_LARGEST_BATCH, *(method for at, method in _DAYS if at == size and method not in _LARGEST_BATCH)]
        for method in methods if ours else []:
            days = _DAYS.get((size, method))
            hours = None if days is None else days * 24 * _GPUS / _EPOCHS
            lines.append(_line(f"{size:<6} DP-Cap: {method}", hours, _LARGEST_BATCH.get(method, {}).get(size)))
    lines.append(
        f"here: {hardware}. DP-Cap: V100 with 32 GB (Sander et al., ICML 2024: text of figure 4, Table 1, appendix A.2). -: not printed."
    )
    return "\n".join(lines)


def _line(label: str, hours: float | None, records: float | None) -> str:
    shown = ["-" if value is None else f"{value:,.0f}" for value in (hours, records)]
    return f"{label:<40} {shown[0]:>22} {shown[1]:>14}"
