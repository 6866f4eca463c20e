"""Zero-shot classification by greedy decoding in the trie of all label captions (Sander et al.,
ICML 2024, appendix A.3.1).

The tokenised captions of a label set form a trie whose leaves are ends of captions. From the root,
the captioner picks at each node the most likely child token until EOS. This costs one caption per
image, however many classes there are; it is greedy and does not backtrack.

Legend: B images, A unfinished images, C children of a node, S encoder tokens, D width, V
vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpvision.config import BOS_ID, EOS_ID, PAD_ID
from dpvision.errors import DataError
from dpvision.models.captioner import Captioner


class LabelTrie:
    """The trie of the captions of all classes."""

    def __init__(self, captions: Sequence[Sequence[Sequence[int]]]) -> None:
        """
        Args:
            captions: for each class (or set of classes), the tokens (without BOS and EOS) of its
                captions; no two share one.
        """
        self._children: list[dict[int, int]] = [{}]
        """Children of each node, from token to node index."""
        self._class_of: dict[int, int] = {}
        """Class of each node after EOS."""
        for label, own in enumerate(captions):
            for words in own:
                leaf = self._add([*words, EOS_ID])
                assert self._class_of.setdefault(leaf, label) == label

    def _add(self, tokens: Sequence[int]) -> int:
        node = 0
        for token in tokens:
            children = self._children[node]
            if token not in children:
                children[token] = len(self._children)
                self._children.append({})
            node = children[token]
        return node

    @torch.inference_mode()
    def classify(self, model: Captioner, memory_BSD: Tensor) -> Tensor:
        """Return the class of each image, int64 (B,) on the CPU; -1 (wrong) if two tokens are
        equally likely.

        Raises:
            DataError: token scores are not finite.
        """
        num_B = len(memory_BSD)
        class_B = torch.full((num_B,), -1, dtype=torch.int64)
        cache = model.start_cache(memory_BSD)
        going = [(b, 0, BOS_ID) for b in range(num_B)]  # image, node, next input token
        while going:
            logit_AV, cache = model.step(
                torch.tensor([token for *_, token in going], device=memory_BSD.device), cache
            )
            further: dict[int, tuple[int, int, int]] = {}
            for node in {node for _, node, _ in going}:
                rows = [a for a, (_, at, _) in enumerate(going) if at == node]
                for a, token in zip(rows, self._next(node, logit_AV[rows]), strict=True):
                    b = going[a][0]
                    if token == EOS_ID:
                        class_B[b] = self._class_of[self._children[node][token]]
                    elif token != PAD_ID:
                        further[a] = (b, self._children[node][token], token)
            kept = sorted(further)
            if len(kept) < len(going):
                cache = cache.select(
                    torch.tensor(kept, dtype=torch.int64, device=memory_BSD.device)
                )
            going = [further[a] for a in kept]
        return class_B

    def _next(self, node: int, logit_BV: Tensor) -> list[int]:
        """Return the most likely child token of a node for each row; PAD for a tie."""
        tokens = sorted(self._children[node])
        logit_BC = logit_BV[:, tokens].float().cpu()
        if not torch.isfinite(logit_BC).all():
            raise DataError(
                "zero-shot: token scores are not finite; expected finite ones. The run "
                "diverged: lower --optim.learning-rate."
            )
        best_B = logit_BC.max(dim=1)
        tied_B = (logit_BC == best_B.values[:, None]).sum(dim=1) > 1
        return [
            PAD_ID if tied else tokens[c]
            for c, tied in zip(best_B.indices.tolist(), tied_B.tolist(), strict=True)
        ]
