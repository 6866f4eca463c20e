"""Zero-shot classification with a captioner by the paper's two methods (Sander et al., ICML 2024,
appendix A.3.1): greedy decoding in the trie of all label captions, or the caption with the lowest
loss.

The tokenised captions of a label set form a trie whose leaves are ends of captions. From the root,
the captioner picks at each node the most likely child token until EOS. This costs one caption per
image, however many classes there are; it is greedy and does not backtrack.

Legend: N images, B images of a batch, A unfinished images, C captions (or children of a node), L
tokens, S encoder tokens, D width, V vocabulary.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from dpvision.config import BOS_ID, EOS_ID, PAD_ID
from dpvision.data.store import Store
from dpvision.errors import ConfigError, DataError
from dpvision.eval.any_of_labels import AnyOfLabels
from dpvision.eval.captions.candidate_losses import best_candidate
from dpvision.eval.captions.choice import encoded_images
from dpvision.eval.captions.image_source import StoreImages
from dpvision.eval.captions.label_sets import LabelSet, prompted
from dpvision.eval.captions.open_captioner import CaptionProtocol, OpenCaptioner
from dpvision.eval.captions.settings import PROMPT, Asking
from dpvision.eval.captions.two_tower import Asker
from dpvision.eval.metric import Metric, Scoring, checked_metric
from dpvision.eval.score import Score
from dpvision.models.captioner import Captioner

Method = Literal["trie", "loss"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class ZeroShotSettings:
    """Settings of zero-shot classification; the defaults are the paper's."""

    methods: tuple[Method, ...] = METHODS
    """"trie" costs one caption per image, "loss" the captions of all labels."""
    prompt: str = PROMPT
    match_article: bool = False
    """Whether to use "an" before a vowel if the prompt ends in "a"."""
    limit: int | None = None
    """Maximum number of images, a fixed random subset; the paper used 10,000 of ImageNet's
    validation images.
    """

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit >= 1:
            raise ConfigError(
                f"zero-shot: limit={self.limit!r}; expected at least 1 image. Omit it for all."
            )


@dataclass(frozen=True)
class ZeroShot(CaptionProtocol):
    """``zero_shot_scores`` as a protocol, by the metric that the store declares."""

    store: Store
    labels: LabelSet
    settings: ZeroShotSettings = field(default_factory=ZeroShotSettings)
    any_of: AnyOfLabels | None = None

    @property
    def test_data(self) -> str:
        return self.store.path.name

    @property
    def needs(self) -> Store:
        return self.store

    def run(self, askers: Sequence[Asker], how: Asking) -> list[Score]:
        metric = checked_metric(self.store.meta.get("metric") or "accuracy")
        return zero_shot_scores(
            askers, self.store, self.labels, self.settings, how, metric=metric, any_of=self.any_of
        )


def checked_methods(names: Sequence[str]) -> tuple[Method, ...]:
    """Return the methods of these names. Raises ConfigError for an unknown one, or for none."""
    if not names or set(names) - set(METHODS):
        raise ConfigError(
            f"zero-shot: method={','.join(names)!r}; expected {' or '.join(METHODS)}. Omit it "
            "for both."
        )
    return tuple(method for method in METHODS if method in names)


def zero_shot_scores(
    askers: Sequence[Asker],
    store: Store,
    labels: LabelSet,
    settings: ZeroShotSettings | None = None,
    how: Asking | None = None,
    *,
    metric: Metric = "accuracy",
    any_of: AnyOfLabels | None = None,
) -> list[Score]:
    """Return the accuracy on a store's labelled images, by method, for each captioner.

    With ``any_of`` the score is accuracy by these classes, whatever the metric. An answer is a
    caption, and right if it is one of the image's class: a string that stands for several classes
    is right for each of them.

    Chance is the score of the best constant answer: the share of the most frequent class (for
    ``mean_per_class``, 1 / number of classes), or more where a string stands for several.

    Raises:
        DataError: no labelled or readable image; a label without a string; a label's caption is too
            long for the model, or has the same tokens as another string's of another class; scores
            are not finite.
    """
    settings, how = settings or ZeroShotSettings(), how or Asking()
    row_N = _labelled_rows(store, labels, settings.limit)
    source = StoreImages(store, row_N)
    scores = []
    for ready in askers:
        methods = _methods_of(ready, settings.methods)
        answers = _answers(_label_words(ready, labels, settings))
        trie = LabelTrie(list(answers.values()))
        token_CL, answer_C = _rows(ready, list(answers.values()))
        read: list[np.ndarray] = []
        predicted: dict[Method, list[np.ndarray]] = {method: [] for method in methods}
        for memory_BSD, place_B in encoded_images(ready, source, how):
            read.append(row_N[place_B])
            if "trie" in predicted and isinstance(ready, OpenCaptioner):
                predicted["trie"].append(trie.classify(ready.model, memory_BSD).numpy())
            if "loss" in predicted:
                token_BCL = token_CL.to(memory_BSD.device).expand(len(memory_BSD), -1, -1)
                loss_BC = ready.losses(memory_BSD, token_BCL).cpu()
                if not torch.isfinite(loss_BC).all():
                    raise DataError(
                        "zero-shot: losses are not finite; expected finite ones. The run "
                        "diverged: train again."
                    )
                predicted["loss"].append(
                    best_candidate(loss_BC, answer_C.expand(len(loss_BC), -1)).numpy()
                )
            if how.progress is not None:
                how.progress(
                    f"zero-shot, {ready.name}: {int(place_B[-1]) + 1:,} of {len(row_N):,} images"
                )
        if not read:
            raise DataError(
                f"zero-shot: {store.path} has no readable image with a label; expected one or "
                "more. Import the source again."
            )
        read_N = np.concatenate(read)
        truth_N = store.labels[read_N]
        private = ready.confidential or store.results_visibility == "private"
        scoring = Scoring(metric, any_of, "private" if private else "public")
        right_N = [
            {int(truth)} if any_of is None else any_of.accepted_N[row]
            for truth, row in zip(truth_N, read_N, strict=True)
        ]
        shared = [
            np.full(len(read_N), answer)
            for answer, classes in enumerate(answers)
            if len(classes) > 1
        ]
        for method in methods:
            way = "walk through the label tree" if method == "trie" else ready.rule
            described = f"{way}, {_described(labels, settings)}, {how.fit}"
            made, *constant = (
                scoring.score(
                    ready.name,
                    "zero-shot",
                    described,
                    [_classes(answer_N, list(answers), right_N)],
                    truth_N,
                    read_N,
                )
                for answer_N in (np.concatenate(predicted[method]), *shared)
            )
            scores.append(
                replace(made, chance=max(made.chance, *(score.value for score in constant)))
                if constant
                else made
            )
    return scores


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


def _answers(words: list[list[list[int]]]) -> dict[tuple[int, ...], list[list[int]]]:
    """Return the captions that stand for the same classes, by these classes, in the order of the
    labels.
    """
    classes_of: dict[tuple[int, ...], list[int]] = {}
    for label, own in enumerate(words):
        for caption in own:
            classes_of.setdefault(tuple(caption), []).append(label)
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for tokens, classes in classes_of.items():
        found.setdefault(tuple(dict.fromkeys(classes)), []).append(list(tokens))
    return found


def _classes(
    answer_N: np.ndarray, classes: list[tuple[int, ...]], right_N: Sequence[Set[int]]
) -> np.ndarray:
    """Return the class that each answer is taken for: a right one where it stands for one,
    otherwise its first; -1 for none.
    """
    return np.array(
        [
            -1
            if answer < 0
            else next((k for k in classes[answer] if k in right), classes[answer][0])
            for answer, right in zip(answer_N.tolist(), right_N, strict=True)
        ],
        dtype=np.int64,
    )


def _methods_of(ready: Asker, asked: tuple[Method, ...]) -> tuple[Method, ...]:
    """Return the methods asked for that apply: two towers give no next token to walk a trie by."""
    if isinstance(ready, OpenCaptioner):
        return asked
    if "loss" not in asked:
        raise ConfigError(
            f"zero-shot: method={','.join(asked)!r} with {ready.name}; expected loss, which "
            "compares cosines: a model of two towers generates no text. Omit --method."
        )
    return ("loss",)


def _described(labels: LabelSet, settings: ZeroShotSettings) -> str:
    lowered = [{string.lower() for string in strings} for strings in labels.classes]
    strings, shared = (
        sum(map(len, labels.classes)),
        sum(map(len, lowered)) - len(set().union(*lowered)),
    )
    asked = f"{len(labels.classes)} classes of {labels.name}" + (
        f" with {strings} strings" if strings > len(labels.classes) else ""
    )
    asked += f", {shared} of them shared by classes" if shared else ""
    article = ", a or an" if settings.match_article else ""
    return f'{asked}, "{settings.prompt}"{article}'


def _labelled_rows(store: Store, labels: LabelSet, limit: int | None) -> np.ndarray:
    row_N = np.flatnonzero(store.labels >= 0)
    if not len(row_N):
        raise DataError(
            f"zero-shot: {store.path} has no labels; expected a class for each image. Import it "
            "with --label-from FIELD."
        )
    largest = int(store.labels.max())
    if largest >= len(labels.classes):
        raise DataError(
            f"zero-shot: {store.path} has label={largest}; expected 0 to "
            f"{len(labels.classes) - 1}, the classes of {labels.name}. Give the label set of "
            "these images."
        )
    if limit is not None and limit < len(row_N):
        row_N = np.sort(np.random.Generator(np.random.PCG64(0)).permutation(row_N)[:limit])
    return row_N


def _label_words(
    ready: Asker, labels: LabelSet, settings: ZeroShotSettings
) -> list[list[list[int]]]:
    """Return the tokens of every caption of every class, without truncation."""
    found: list[list[list[int]]] = []
    owner: dict[tuple[int, ...], tuple[int, str]] = {}
    for label, captions in enumerate(
        prompted(labels, settings.prompt, match_article=settings.match_article)
    ):
        own = [ready.words(caption) for caption in captions]
        for string, caption, words in zip(labels.classes[label], captions, own, strict=True):
            if (length := len(words) + ready.special) > ready.num_tokens:
                raise DataError(
                    f"zero-shot: {caption!r} is {length} tokens; expected at most "
                    f"{ready.num_tokens}, the longest caption of the model. Shorten the string "
                    f"of class {label}, or the prompt."
                )
            other, first = owner.setdefault(tuple(words), (label, string.lower()))
            if other != label and first != string.lower():
                raise DataError(
                    f"zero-shot: class {other} ({', '.join(labels.classes[other])}) and class "
                    f"{label} ({', '.join(labels.classes[label])}) have the same tokens; "
                    "expected different strings to have different tokens. Rename one of them."
                )
        found.append(own)
    return found


def _rows(ready: Asker, words: list[list[list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token_CL of all distinct captions, and the answer that each gives, int64 (C,)."""
    flat = list({tuple(w): answer for answer, own in enumerate(words) for w in own}.items())
    token_CL = torch.from_numpy(np.stack([ready.row(list(own_words)) for own_words, _ in flat]))
    return token_CL, torch.tensor([answer for _, answer in flat])
