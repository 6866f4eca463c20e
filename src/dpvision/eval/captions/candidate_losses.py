"""Losses of many candidate captions of an image, with the image encoded once.

    loss(c | x) = -1/T * sum_t log p(c_t | c_<t, x)        over the T tokens of caption c, EOS
                                                           included: the training loss

The keys and values of an image's tokens are the same for every candidate. They are computed once
per image, and the tokens of all its candidates attend to them in one row, so that a candidate costs
only its own tokens.

Legend: B images, C candidates of an image, L tokens, S encoder tokens, D width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dpvision.config import PAD_ID
from dpvision.models.captioner import Captioner
from dpvision.models.cross_decoder import CrossBlock, KeysValues, attend

_TOKENS_AT_ONCE = 4096
"""Tokens decoded together: their attention to 197 encoder tokens takes 40 MB with 12 heads."""
_LOGITS_AT_ONCE = 1 << 22


@torch.inference_mode()
def candidate_losses(model: Captioner, memory_BSD: Tensor, token_BCL: Tensor) -> Tensor:
    """Return the loss of every candidate given its image.

    Args:
        memory_BSD: from ``Captioner.encode``.
        token_BCL: int64, each row BOS, words, EOS, padding, at most ``num_tokens``. A row of
            padding only is not a candidate.

    Returns:
        loss_BC float32, equal to ``captioner.caption_losses`` up to rounding; infinite for rows
        that are not candidates.
    """
    token_BCL = token_BCL[:, :, : _longest(token_BCL)]
    num_B, num_C, length = token_BCL.shape
    loss_BC = memory_BSD.new_full((num_B, num_C), torch.inf, dtype=torch.float32)
    step_B = max(1, _TOKENS_AT_ONCE // (num_C * length))
    step_C = max(1, _TOKENS_AT_ONCE // length)
    for b in range(0, num_B, step_B):
        offered = [
            block.cross_attention.offer(memory_BSD[b : b + step_B]) for block in _blocks(model)
        ]
        for c in range(0, num_C, step_C):
            here = (slice(b, b + step_B), slice(c, c + step_C))
            loss_BC[here] = _losses(model, offered, token_BCL[here])
    return loss_BC


def best_candidate(loss_BC: Tensor, group_BC: Tensor) -> Tensor:
    """Return the group of the candidate with the lowest loss, int64 (B,); -1 for a tie between
    groups or a non-finite loss.

    A tie counts as wrong: otherwise a model with equal losses for all candidates would be right
    whenever the true one comes first.

    Args:
        group_BC: int64, at least 0, the group of each candidate.
    """
    lowest_B1 = loss_BC.min(dim=1, keepdim=True).values
    at_lowest_BC = loss_BC == lowest_B1
    largest_B = group_BC.masked_fill(~at_lowest_BC, -1).max(dim=1).values
    smallest_B = group_BC.masked_fill(~at_lowest_BC, torch.iinfo(torch.int64).max).min(dim=1).values
    # A NaN makes the minimum NaN, which equals nothing: this gives -1 too.
    return torch.where((largest_B == smallest_B) & torch.isfinite(lowest_B1[:, 0]), largest_B, -1)


def _blocks(model: Captioner) -> list[CrossBlock]:
    return [block for block in model.decoder.blocks if isinstance(block, CrossBlock)]


def _longest(token_BCL: Tensor) -> int:
    """Return the number of tokens up to the last that is not padding, at least two. In a causal
    decoder later ones change nothing.
    """
    used_L = (token_BCL != PAD_ID).flatten(0, 1).any(dim=0)
    return max(2, int(used_L.nonzero().max()) + 1 if bool(used_L.any()) else 2)


def _losses(model: Captioner, offered: list[KeysValues], token_BCL: Tensor) -> Tensor:
    num_B, num_C, length = token_BCL.shape
    token_NL = token_BCL.flatten(0, 1)
    x_NLD = model.word_embed(token_NL[:, :-1]) + model.word_position_LD[: length - 1]
    seen = torch.ones(length - 1, length - 1, dtype=torch.bool, device=x_NLD.device).tril()
    for block, memory in zip(_blocks(model), offered, strict=True):
        q_NHLK, own = block.self_attention.project(x_NLD)
        x_NLD = block.norm1(x_NLD + block.self_attention.out(attend(q_NHLK, own, seen)))
        # All tokens of an image's candidates in one row: they attend to the image, not to each
        # other.
        x_NLD = block.look_and_think(x_NLD.view(num_B, num_C * (length - 1), -1), memory).view_as(
            x_NLD
        )
    target_NL = token_NL[:, 1:]
    counted_NL = target_NL != PAD_ID
    loss_NL = torch.zeros(target_NL.shape, dtype=torch.float32, device=x_NLD.device)
    loss_NL[counted_NL] = _word_losses(
        model, model.word_norm(x_NLD[counted_NL]), target_NL[counted_NL]
    )
    # In double precision the mean of equal numbers is exact, so a model with equal losses for all
    # tokens ties exactly.
    loss_N = (loss_NL.sum(dim=1, dtype=torch.float64) / counted_NL.sum(dim=1)).float()
    return loss_N.masked_fill(~counted_NL.any(dim=1), torch.inf).view(num_B, num_C)


def _word_losses(model: Captioner, hidden_MD: Tensor, target_M: Tensor) -> Tensor:
    """Return the cross-entropy of M tokens, in chunks, so that their logits are never all
    stored.
    """
    rows = max(1, _LOGITS_AT_ONCE // model.word_head.out_features)
    parts = [
        F.cross_entropy(model.word_head(hidden).float(), target, reduction="none")
        for hidden, target in zip(hidden_MD.split(rows), target_M.split(rows), strict=True)
    ]
    return torch.cat(parts) if parts else hidden_MD.new_zeros(0, dtype=torch.float32)
