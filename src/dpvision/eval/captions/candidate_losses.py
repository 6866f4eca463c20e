"""Losses of many candidate captions of an image, the image encoded once.

    loss(c | x) = -1/T * sum_t log p(c_t | c_<t, x)        over the T tokens of caption c, its end counted: the training loss

What a block makes of the image (keys and values of its tokens) is the same for every candidate. Here it is made once for an image and
the candidates' words stand in one row to look at it, so that the cost of a candidate is that of its words.

Legend: B images, C candidates of an image, L tokens, S encoder tokens, D width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dpvision.config import PAD_ID
from dpvision.models.captioner import Captioner
from dpvision.models.cross_decoder import CrossBlock, KeysValues, attend

_TOKENS_AT_ONCE = 4096
"""Words that go through the decoder together: their attention to 197 encoder tokens takes 40 MB with 12 heads."""
_LOGITS_AT_ONCE = 1 << 22


@torch.inference_mode()
def candidate_losses(model: Captioner, memory_BSD: Tensor, token_BCL: Tensor) -> Tensor:
    """Loss of every candidate given its image.

    Args:
        memory_BSD: of ``Captioner.encode``.
        token_BCL: int64, each row BOS, words, EOS, padding, at most ``num_tokens``. A row of padding only is no candidate.

    Returns:
        loss_BC float32, the numbers of ``captioner.caption_losses`` up to rounding; infinite where there is no candidate.
    """
    token_BCL = token_BCL[:, :, : _longest(token_BCL)]
    num_B, num_C, length = token_BCL.shape
    loss_BC = memory_BSD.new_full((num_B, num_C), torch.inf, dtype=torch.float32)
    step_B = max(1, _TOKENS_AT_ONCE // (num_C * length))
    step_C = max(1, _TOKENS_AT_ONCE // length)
    for b in range(0, num_B, step_B):
        offered = [block.cross_attention.offer(memory_BSD[b : b + step_B]) for block in _blocks(model)]
        for c in range(0, num_C, step_C):
            here = (slice(b, b + step_B), slice(c, c + step_C))
            loss_BC[here] = _losses(model, offered, token_BCL[here])
    return loss_BC


def best_candidate(loss_BC: Tensor, group_BC: Tensor) -> Tensor:
    """The group of the candidate with the lowest loss, int64 (B,); -1 where candidates of different groups share it, or it is not finite.

    A tie is no answer, so it is wrong: else a model that says the same about all candidates would be right whenever the true one happens
    to stand first.

    Args:
        group_BC: int64, 0 and up, what a candidate stands for.
    """
    lowest_B1 = loss_BC.min(dim=1, keepdim=True).values
    at_lowest_BC = loss_BC == lowest_B1
    largest_B = group_BC.masked_fill(~at_lowest_BC, -1).max(dim=1).values
    smallest_B = group_BC.masked_fill(~at_lowest_BC, torch.iinfo(torch.int64).max).min(dim=1).values
    # NaN anywhere makes the minimum NaN, which no comparison equals: no answer either.
    return torch.where((largest_B == smallest_B) & torch.isfinite(lowest_B1[:, 0]), largest_B, -1)


def _blocks(model: Captioner) -> list[CrossBlock]:
    return [block for block in model.decoder.blocks if isinstance(block, CrossBlock)]


def _longest(token_BCL: Tensor) -> int:
    """Tokens up to the last that is not padding, at least two: later words change nothing for a causal decoder."""
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
        # All words of an image's candidates in one row: they look at the image, not at each other.
        x_NLD = block.look_and_think(x_NLD.view(num_B, num_C * (length - 1), -1), memory).view_as(x_NLD)
    target_NL = token_NL[:, 1:]
    counted_NL = target_NL != PAD_ID
    loss_NL = torch.zeros(target_NL.shape, dtype=torch.float32, device=x_NLD.device)
    loss_NL[counted_NL] = _word_losses(model, model.word_norm(x_NLD[counted_NL]), target_NL[counted_NL])
    # Summed in double precision, the mean of equal numbers is that number: a model that says the same of every word ties exactly.
    loss_N = (loss_NL.sum(dim=1, dtype=torch.float64) / counted_NL.sum(dim=1)).float()
    return loss_N.masked_fill(~counted_NL.any(dim=1), torch.inf).view(num_B, num_C)


def _word_losses(model: Captioner, hidden_MD: Tensor, target_M: Tensor) -> Tensor:
    """Cross-entropy of M words, their logits never all held."""
    rows = max(1, _LOGITS_AT_ONCE // model.word_head.out_features)
    parts = [
        F.cross_entropy(model.word_head(hidden).float(), target, reduction="none")
        for hidden, target in zip(hidden_MD.split(rows), target_M.split(rows), strict=True)
    ]
    return torch.cat(parts) if parts else hidden_MD.new_zeros(0, dtype=torch.float32)
