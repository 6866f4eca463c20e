"""Losses of candidates: the training loss as oracle, and ties that are no answers."""

import pytest
import torch
from torch import Tensor

from dpvision.config import BOS_ID, EOS_ID, PAD_ID
from dpvision.eval.captions import candidate_losses as module
from dpvision.eval.captions.candidate_losses import best_candidate, candidate_losses
from dpvision.models.captioner import caption_losses

from .captioners import VOCAB_SIZE, make_captioner


def _candidates(num_B: int, num_C: int, num_tokens: int) -> Tensor:
    """Random captions of 0 to num_tokens - 2 words."""
    rng = torch.Generator().manual_seed(3)
    token_BCL = torch.full((num_B, num_C, num_tokens), PAD_ID)
    for row in token_BCL.flatten(0, 1):
        length = int(torch.randint(0, num_tokens - 1, (1,), generator=rng))
        row[: length + 2] = torch.cat(
            [
                torch.tensor([BOS_ID]),
                torch.randint(3, VOCAB_SIZE, (length,), generator=rng),
                torch.tensor([EOS_ID]),
            ]
        )
    return token_BCL


@pytest.mark.parametrize("at_once", [1, 50, 4096])
def test_losses_are_the_training_losses_of_each_pair(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TOKENS_AT_ONCE", at_once)
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", VOCAB_SIZE * max(1, at_once // 7))
    model = make_captioner().double()
    memory_BSD = model.encode(
        torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    )
    token_BCL = _candidates(3, 5, 40)
    token_BCL[1, 3:] = PAD_ID  # this image has three candidates
    found_BC = candidate_losses(model, memory_BSD, token_BCL)
    pairs = [(b, c) for b in range(3) for c in range(5) if (b, c) not in ((1, 3), (1, 4))]
    slowly = {
        (b, c): caption_losses(model, memory_BSD[b : b + 1], token_BCL[b, c][None]).item()
        for b, c in pairs
    }
    for (b, c), loss in slowly.items():
        assert found_BC[b, c].item() == pytest.approx(loss, rel=1e-5), (b, c)
    assert torch.isinf(found_BC[1, 3:]).all()
    assert len({round(loss, 3) for loss in slowly.values()}) > 8, (
        "these weights tell captions apart"
    )


def test_a_loss_depends_on_the_image() -> None:
    model = make_captioner()
    memory_BSD = model.encode(torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)))
    loss_BC = candidate_losses(model, memory_BSD, _candidates(1, 4, 12).expand(2, -1, -1))
    assert (loss_BC[0] - loss_BC[1]).abs().min() > 1e-4


def test_ties_between_groups_are_no_answer_and_within_a_group_they_are() -> None:
    loss_BC = torch.tensor(
        [[1.0, 2.0, 3.0], [1.0, 1.0, 3.0], [1.0, 3.0, 1.0], [torch.nan, 1.0, 2.0], [torch.inf] * 3]
    )
    group_BC = torch.tensor([[4, 5, 4]]).expand(5, -1)
    assert best_candidate(loss_BC, group_BC).tolist() == [4, -1, 4, -1, -1]
