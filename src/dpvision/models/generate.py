"""Generate captions by greedy search, beam search or sampling, with cached keys and values.

    memory_BSD = model.encode(x_BCHW)
    said = generate(model, memory_BSD, GenerateSettings(method="beam"))
    text = tokenizer.decode(said[0][0].ids)

An image's captions depend only on the weights, the settings, that image and, for sampling, its
random numbers. The other images of its batch change at most the last bits of a sum.

Legend: B images (unfinished ones in a beam search), N captions or beams per image, K captions kept
of a beam search, A unfinished captions, L tokens, V vocabulary, S encoder tokens, D decoder width.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dpvision.config import BOS_ID, EOS_ID, PAD_ID
from dpvision.config.generation import GenerateSettings
from dpvision.errors import CheckpointError
from dpvision.models.captioner import Cache, Captioner

NEVER_SAID = (PAD_ID, BOS_ID)
"""Tokens that never occur in a caption."""
_Pick = Callable[[Tensor, Tensor, int], Tensor]
"""From log_probability_AV (-inf for forbidden tokens), rows (A,) and position to token_A."""


class Said(NamedTuple):
    """One caption."""

    ids: tuple[int, ...]
    """Tokens of the prompt and the generated text, without BOS and EOS."""
    log_probability: float
    """Mean log probability (nats) of the generated tokens, EOS included: minus the training loss if
    there is no prompt.
    """


@torch.inference_mode()
def generate(
    model: Captioner,
    memory_BSD: Tensor,
    settings: GenerateSettings | None = None,
    uniform_BNL: Tensor | None = None,
) -> list[list[Said]]:
    """Generate captions. PAD and BOS never occur; a caption of maximum length is ended there.

    Args:
        memory_BSD: from ``Captioner.encode``.
        uniform_BNL: random numbers in [0, 1) for sampling, for each image and caption at least
            ``settings.longest(...) + 1``.

    Returns:
        For each image its ``num`` captions, best first if they are ranked; fewer if a tiny
        vocabulary does not have as many.

    Raises:
        ConfigError: as ``GenerateSettings.longest``.
        CheckpointError: the model's logits are not finite.
    """
    how = settings or GenerateSettings()
    max_words = how.longest(model.cfg.num_tokens, model.cfg.vocab_size)
    logit_BV, cache = _after_prompt(model, memory_BSD, how.prompt)
    if not logit_BV.isfinite().all():
        raise CheckpointError(
            "caption: logits are not finite; expected finite ones. The run diverged: lower "
            "--optim.learning-rate."
        )
    if how.method == "beam":
        said_BNL, total_BN = beam_search(
            model,
            logit_BV,
            cache,
            num=how.num,
            beams=how.beams,
            length_penalty=how.length_penalty,
            min_words=how.min_words,
            max_words=max_words,
            never=NEVER_SAID,
        )
    else:
        row = torch.arange(len(memory_BSD), device=memory_BSD.device).repeat_interleave(how.num)
        if how.num > 1:
            logit_BV, cache = logit_BV[row], cache.select(row)
        pick: _Pick = _likeliest
        if how.method == "sample":
            assert (
                uniform_BNL is not None
                and uniform_BNL.shape[:2] == (len(memory_BSD), how.num)
                and uniform_BNL.shape[2] > max_words
            )
            pick = _sampler(uniform_BNL.flatten(0, 1).to(memory_BSD.device), how)
        said_AL, total_A = _word_by_word(model, logit_BV, cache, pick, how.min_words, max_words)
        said_BNL, total_BN = (
            said_AL.unflatten(0, (-1, how.num)),
            total_A.unflatten(0, (-1, how.num)),
        )
    return [
        _captions(said, total, how.prompt)
        for said, total in zip(said_BNL.tolist(), total_BN.tolist(), strict=True)
    ]


def _after_prompt(
    model: Captioner, memory_BSD: Tensor, prompt: tuple[int, ...]
) -> tuple[Tensor, Cache]:
    def told(token: int, cache: Cache) -> tuple[Tensor, Cache]:
        return model.step(torch.full((len(memory_BSD),), token, device=memory_BSD.device), cache)

    logit_BV, cache = told(BOS_ID, model.start_cache(memory_BSD))
    for token in prompt:
        logit_BV, cache = told(token, cache)
    return logit_BV, cache


def _word_by_word(
    model: Captioner, logit_AV: Tensor, cache: Cache, pick: _Pick, min_words: int, max_words: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens of all captions, padded after EOS, and their total log probabilities.

    Finished captions leave the batch.
    """
    said_BL = torch.full((len(logit_AV), max_words + 1), PAD_ID, device=logit_AV.device)
    total_B = torch.zeros(len(logit_AV), dtype=torch.float64, device=logit_AV.device)
    row_A = torch.arange(len(logit_AV), device=logit_AV.device)
    for place in range(max_words + 1):
        log_probability_AV = logit_AV.to(
            torch.promote_types(logit_AV.dtype, torch.float32)
        ).log_softmax(1)
        token_A = pick(_allowed(log_probability_AV, place, min_words, max_words), row_A, place)
        said_BL[row_A, place] = token_A
        total_B[row_A] += log_probability_AV.gather(1, token_A[:, None])[:, 0]
        on_A = token_A != EOS_ID
        if not on_A.any():
            break
        if not on_A.all():
            cache, row_A, token_A = cache.select(on_A.nonzero()[:, 0]), row_A[on_A], token_A[on_A]
        logit_AV, cache = model.step(token_A, cache)
    return said_BL, total_B


def _allowed(log_probability_AV: Tensor, place: int, min_words: int, max_words: int) -> Tensor:
    """Return the log probabilities with -inf for tokens not allowed at position ``place``.

    At the last one only EOS is allowed.
    """
    if place == max_words:
        allowed_AV = torch.full_like(log_probability_AV, -torch.inf)
        allowed_AV[:, EOS_ID] = log_probability_AV[:, EOS_ID]
        return allowed_AV
    allowed_AV = log_probability_AV.clone()
    allowed_AV[:, list(NEVER_SAID) if place >= min_words else [*NEVER_SAID, EOS_ID]] = -torch.inf
    return allowed_AV


def _likeliest(log_probability_AV: Tensor, row_A: Tensor, place: int) -> Tensor:
    return log_probability_AV.argmax(1)


def _sampler(uniform_AL: Tensor, how: GenerateSettings) -> _Pick:
    def pick(log_probability_AV: Tensor, row_A: Tensor, place: int) -> Tensor:
        return draw_words(
            log_probability_AV, uniform_AL[row_A, place], how.temperature, how.top_k, how.top_p
        )

    return pick


def draw_words(
    log_probability_AV: Tensor,
    uniform_A: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Tensor:
    """Draw one token per row from softmax(log_probability / temperature).

    Truncated to its ``top_k`` and then ``top_p`` most likely tokens.

    Inverts the distribution function over tokens in the order of their ids: in an order by
    probability, rounding could swap nearly equal ones and change the token.

    Args:
        log_probability_AV: logits up to a constant, -inf for forbidden tokens.
        uniform_A: in [0, 1).

    Returns:
        token_A, int64.
    """
    probability_AV = (log_probability_AV / temperature).double().softmax(1)
    if top_k is not None or top_p < 1:
        sorted_AV, token_AV = probability_AV.sort(dim=1, descending=True, stable=True)
        sorted_AV[:, top_k or len(sorted_AV[0]) :] = 0
        sorted_AV /= sorted_AV.sum(dim=1, keepdim=True)
        before_AV = sorted_AV.cumsum(1) - sorted_AV
        before_AV[:, 0] = 0  # always keep the most likely token, whatever the rounding
        probability_AV = torch.zeros_like(sorted_AV).scatter(
            1, token_AV, sorted_AV * (before_AV < top_p)
        )
    upto_AV = probability_AV.cumsum(1)
    found_A = torch.searchsorted(
        upto_AV, (uniform_A.double() * upto_AV[:, -1])[:, None], right=True
    )[:, 0]
    # A product rounded up to the total selects the last allowed token.
    last_A = (probability_AV > 0).long().cumsum(1).argmax(1)
    return torch.minimum(found_A, last_A)


def _captions(
    said_NL: list[list[int]], total_N: list[float], prompt: tuple[int, ...]
) -> list[Said]:
    made = []
    for said, total in zip(said_NL, total_N, strict=True):
        if total > -math.inf:
            words = said[: said.index(EOS_ID)]
            made.append(Said((*prompt, *words), total / (len(words) + 1)))
    return made


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
    """Return the best finished captions that the search finds.

    Best by log probability / length^length_penalty (EOS included).

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
