"""Image captioner in DP-Cap's form.

Sander et al., ICML 2024, section 3.1 and appendix A.1; Cap of Tschannen et al. 2023.

Frozen positions and class token, word embeddings not tied to the head, head = LayerNorm + Linear.
DP-Cap's frozen type embedding of the encoder's tokens, a constant that the bridge's bias absorbs,
is left out here.

Legend: B records, L caption tokens, S encoder tokens, D decoder width, V vocabulary, C channels, H
height, W width.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from dpvision.config import PAD_ID, CaptionerConfig
from dpvision.models.cross_decoder import POST_NORM_EPS, CrossBlock, CrossDecoder, KeysValues
from dpvision.models.cross_mae import PatchHead
from dpvision.models.head import IGNORED, linear_cross_entropy
from dpvision.models.layers import sincos_sequence
from dpvision.models.vit import ViT


class Cache(NamedTuple):
    """Keys and values of images and of the tokens so far; every tensor has the record as its first
    dimension.
    """

    memory: list[KeysValues]
    """Keys and values of the encoder's tokens, one per block."""
    past: list[KeysValues | None]
    """Keys and values of the tokens so far, one per block; None before the first."""
    length: int
    """Number of tokens so far."""

    def select(self, row_B: Tensor, *, memory: bool = True) -> "Cache":
        """Return the cache of records ``row_B``, int64, in that order, with repetitions;
        ``memory=False`` leaves the images unchanged.
        """
        chosen = [KeysValues(k[row_B], v[row_B]) for k, v in self.memory] if memory else self.memory
        return Cache(
            chosen,
            [
                None if past is None else KeysValues(past[0][row_B], past[1][row_B])
                for past in self.past
            ],
            self.length,
        )


class Captioner(nn.Module):
    """Image encoder and caption decoder over one vocabulary."""

    word_position_LD: Tensor

    def __init__(self, cfg: CaptionerConfig) -> None:
        super().__init__()
        self.cfg = cfg
        width = cfg.decoder.width
        self.encoder = ViT(cfg.encoder).requires_grad_(cfg.train_encoder)
        self.encoder.cls_token.requires_grad_(cfg.train_encoder and cfg.encoder.train_cls)
        self.decoder = CrossDecoder(
            cfg.decoder, cfg.encoder.width, cfg.encoder.image_size // cfg.encoder.patch_size
        )
        self.word_embed = nn.Embedding(cfg.vocab_size, width)
        self.word_norm = nn.LayerNorm(width, eps=POST_NORM_EPS)
        self.word_head = nn.Linear(width, cfg.vocab_size)
        # Replaces every word of a record that is predicted in parallel.
        self.hidden_word = nn.Parameter(torch.zeros(width)) if cfg.parallel_rate > 0 else None
        self.patch_head = (
            PatchHead(cfg.encoder, width, cfg.mask_ratio, "pixels")
            if cfg.reconstruction_weight > 0
            else None
        )
        self.register_buffer(
            "word_position_LD", sincos_sequence(cfg.num_tokens, width), persistent=False
        )

    def encode(self, x_BCHW: Tensor) -> Tensor:
        """Return the decoder's view of the images, memory_BSD: all tokens after the bridge, patches
        with their positions.
        """
        return self.decoder.remember(self.encoder(x_BCHW))

    def decode(
        self, token_BL: Tensor, memory_BSD: Tensor, parallel_B: Tensor | None = None
    ) -> Tensor:
        """Return hidden states, (B, L, D): state l predicts token l + 1 from the image and the
        tokens up to l.

        Args:
            token_BL: int64, starting with BOS; at most ``num_tokens``.
            parallel_B: bool; True for records with all words hidden and full attention among them
                (CapPa). If None, none.
        """
        length = token_BL.shape[1]
        word_BLD = self.word_embed(token_BL)
        seen = torch.ones(length, length, dtype=torch.bool, device=token_BL.device).tril()
        if parallel_B is not None:
            assert self.hidden_word is not None
            word_BLD = torch.where(
                parallel_B[:, None, None], self.hidden_word.to(word_BLD.dtype), word_BLD
            )
            seen = seen | parallel_B[:, None, None, None]
        return self.decoder(word_BLD + self.word_position_LD[:length], memory_BSD, seen)

    def logits(self, hidden_BLD: Tensor) -> Tensor:
        """Return the logits of all words, (B, L, V)."""
        return self.word_head(self.word_norm(hidden_BLD))

    def start_cache(self, memory_BSD: Tensor) -> Cache:
        """Return the cache before the first token."""
        memory = [block.cross_attention.offer(memory_BSD) for block in self._blocks()]
        return Cache(memory, [None] * len(memory), 0)

    def step(self, token_B: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Return the logits after ``token_B``, (B, V), and the extended cache. Equivalent to
        ``decode`` of the whole caption.
        """
        x_B1D = self.word_embed(token_B[:, None]) + self.word_position_LD[cache.length]
        past: list[KeysValues | None] = []
        for block, memory, before in zip(self._blocks(), cache.memory, cache.past, strict=True):
            x_B1D, own = block.extend(x_B1D, memory, before)
            past.append(own)
        return self.logits(x_B1D)[:, 0], Cache(cache.memory, past, cache.length + 1)

    def _blocks(self) -> list[CrossBlock]:
        return cast(list[CrossBlock], list(self.decoder.blocks))


def caption_losses(
    model: Captioner, memory_BSD: Tensor, token_BL: Tensor, parallel_B: Tensor | None = None
) -> Tensor:
    """Return the mean cross-entropy of each caption over its words, with EOS and without padding:
    equation 1 of the paper per record.

    Head and cross-entropy are one function (``head.linear_cross_entropy``), which stores one number
    for each logit with gradients, and none without.

    Args:
        memory_BSD: of ``Captioner.encode``.
        token_BL: int64: BOS, words, EOS, padding. A row without a target gives 0.

    Returns:
        loss_B, float32 also under autocast (float64 for a float64 model).
    """
    hidden_BLD = model.decode(token_BL[:, :-1], memory_BSD, parallel_B)
    target_BL = torch.where(token_BL[:, 1:] == PAD_ID, IGNORED, token_BL[:, 1:])
    head = model.word_head
    loss_BL = linear_cross_entropy(model.word_norm(hidden_BLD), head.weight, head.bias, target_BL)
    return loss_BL.sum(1) / (target_BL != IGNORED).sum(1).clamp(min=1)


def losses(
    model: Captioner,
    x_BCHW: Tensor,
    token_BL: Tensor,
    parallel_B: Tensor | None = None,
    order_BL: Tensor | None = None,
) -> Tensor:
    """Return the training loss of each image with its caption.

    Args:
        x_BCHW: normalised images.
        token_BL, parallel_B: as for ``caption_losses``.
        order_BL: int64 random keys of the patches, as for ``cross_mae.losses``; needed if the model
            has a second loss.

    Returns:
        loss_B, float32 (float64 for a float64 model).
    """
    loss_B = caption_losses(model, model.encode(x_BCHW), token_BL, parallel_B)
    if model.patch_head is None:
        return loss_B
    assert order_BL is not None
    return loss_B + model.cfg.reconstruction_weight * model.patch_head.losses(
        model.encoder, model.decoder, x_BCHW, order_BL
    )
