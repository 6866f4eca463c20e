"""Beam search over captions, for all images of a batch at once.

Legend: B unfinished images, N beams per image, K captions per image, L tokens, V vocabulary.
"""

import torch
from torch import Tensor

from dpvision.config import EOS_ID, PAD_ID
from dpvision.models.captioner import Cache, Captioner


def beam_search(
    model: Captioner,
    logit_BV: Tensor,
    cache: Cache,
    *,
    num: int,
    beams: int,
    length_penalty: float,
    min_words: int,
    max_words: int,
    never: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Return the best finished captions by log probability / length^length_penalty (EOS included)
    that the search finds.

    At each position every beam may end, which makes it a candidate, and the ``beams`` most likely
    continuations are kept. An image is finished when no continuation can bring one of its beams
    among the best ``num``. Stopping early therefore misses nothing, and with as many beams as there
    are prefixes the search is exhaustive.

    Args:
        logit_BV, cache: of the model after the prompt.
        num: K, at most ``beams``.
        min_words, max_words: bounds on the number of tokens before EOS, which is forced at position
            ``max_words``.
        never: tokens that are never generated.

    Returns:
        said_BKL int64, best first: tokens, EOS, padding; total_BK float64 log probabilities, -inf
        for missing captions.
    """
    num_images, vocab, device = *logit_BV.shape, logit_BV.device
    total_BN = torch.full((num_images, beams), -torch.inf, dtype=torch.float64, device=device)
    total_BN[:, 0] = 0
    said_BNL = torch.full((num_images, beams, max_words + 1), PAD_ID, device=device)
    score_BK, best_BK = (
        total_BN[:, :num] - torch.inf,
        total_BN[:, :num] - torch.inf,
    )  # score: by length; best: log probability
    best_BKL = said_BNL[:, :num].clone()
    found_total, found_said = best_BK.clone(), best_BKL.clone()
    image_B = torch.arange(num_images, device=device)
    row_R = image_B.repeat_interleave(beams)
    logit_RV, cache = logit_BV[row_R], cache.select(row_R)
    for place in range(max_words + 1):
        wide = torch.promote_types(logit_RV.dtype, torch.float32)
        log_probability_BNV = logit_RV.to(wide).log_softmax(1).unflatten(0, (-1, beams))
        if place >= min_words:
            ended_BN = total_BN + log_probability_BNV[..., EOS_ID]
            ended_BNL = said_BNL.clone()
            ended_BNL[..., place] = EOS_ID
            score_BK, order_BK = torch.cat(
                [score_BK, ended_BN / (place + 1) ** length_penalty], dim=1
            ).topk(num, dim=1)
            best_BK = torch.cat([best_BK, ended_BN], dim=1).gather(1, order_BK)
            best_BKL = torch.cat([best_BKL, ended_BNL], dim=1).take_along_dim(
                order_BK[..., None], dim=1
            )
        if place < max_words:
            log_probability_BNV[..., [*never, EOS_ID]] = -torch.inf
            total_BN, flat_BN = (
                (total_BN[..., None] + log_probability_BNV).flatten(1).topk(beams, dim=1)
            )
            parent_BN, token_BN = flat_BN // vocab, flat_BN % vocab
            said_BNL = said_BNL.take_along_dim(parent_BN[..., None], dim=1)
            said_BNL[..., place] = token_BN
            # Further tokens can only lower the sum; divided by the maximum length it bounds the
            # score.
            on_B = total_BN[:, 0] / (max_words + 1) ** length_penalty > score_BK[:, -1]
        else:
            on_B = torch.zeros_like(image_B, dtype=torch.bool)
        found_total[image_B], found_said[image_B] = best_BK, best_BKL
        if not on_B.any():
            break
        row_BN = parent_BN + beams * torch.arange(len(parent_BN), device=device)[:, None]
        some_are_done = not bool(on_B.all())
        if some_are_done:
            row_BN, token_BN, total_BN, said_BNL = (
                row_BN[on_B],
                token_BN[on_B],
                total_BN[on_B],
                said_BNL[on_B],
            )
            score_BK, best_BK, best_BKL, image_B = (
                score_BK[on_B],
                best_BK[on_B],
                best_BKL[on_B],
                image_B[on_B],
            )
        # The beams of an image share its memory; only the generated tokens are reordered.
        logit_RV, cache = model.step(
            token_BN.flatten(), cache.select(row_BN.flatten(), memory=some_are_done)
        )
    return found_said, found_total
