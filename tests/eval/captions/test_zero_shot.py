"""Zero-shot classification: a plain walk with full passes as oracle of the tree, all captions one
by one as oracle of the losses.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dpvision.config import BOS_ID, EOS_ID
from dpvision.data.decode import decode
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.data.transform import preprocess
from dpvision.errors import ConfigError, DataError
from dpvision.eval.any_of_labels import AnyOfLabels
from dpvision.eval.captions.label_sets import BUILT_IN, LabelSet, load_label_set, prompted
from dpvision.eval.captions.settings import Asking
from dpvision.eval.captions.zero_shot import (
    LabelTrie,
    Method,
    ZeroShotSettings,
    checked_methods,
    zero_shot_scores,
)
from dpvision.models.captioner import Captioner, caption_losses
from dpvision.synthetic.scenes import LABELS

from ..labelled import write_colours
from .captioners import make_captioner, open_made, words_of_scenes

CIFAR10 = Path(__file__).parents[4] / "shared" / "data" / "cifar10" / "classes.txt"
IMAGENET = Path(__file__).parents[4] / "shared" / "data" / "imagenet1k_sample" / "classes.txt"
SHAPES = LabelSet("shapes", tuple((name,) for name in LABELS))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_scenes(tmp_path_factory.mktemp("zero") / "scenes", 60, 16, first=5000)


def _memory(model: Captioner, num: int, seed: int = 0) -> Tensor:
    return model.encode(torch.randn(num, 3, 16, 16, generator=torch.Generator().manual_seed(seed)))


def _walk_slowly(model: Captioner, memory_SD: Tensor, captions: list[list[list[int]]]) -> int:
    """Greedy choice among all captions that begin as the words so far do, every step a full pass
    over these words.
    """
    whole = {(*words, EOS_ID): label for label, own in enumerate(captions) for words in own}
    said: tuple[int, ...] = ()
    while True:
        allowed = sorted({caption[len(said)] for caption in whole if caption[: len(said)] == said})
        hidden = model.decode(torch.tensor([[BOS_ID, *said]]), memory_SD[None])
        logit = model.logits(hidden)[0, -1]
        said += (max(allowed, key=lambda token: logit[token].item()),)
        if said[-1] == EOS_ID:
            return whole[said]


def _tokens(labels: LabelSet, prompt: str) -> list[list[list[int]]]:
    return [
        [words_of_scenes().words(caption) for caption in own] for own in prompted(labels, prompt)
    ]


@pytest.mark.parametrize(
    "prompt",
    [
        "x",
        *(
            pytest.param(prompt, marks=pytest.mark.slow)
            for prompt in ("this is a photo of a", "an image of a")
        ),
    ],
)
def test_the_walk_is_that_of_a_plain_search_with_full_passes(prompt: str) -> None:
    # "car" and "carpet" share a beginning; "star" is said in two ways; one label begins another
    names = [
        ("car",),
        ("carpet",),
        ("car park",),
        ("star", "pointed thing"),
        ("red disc",),
        ("red",),
        ("rings and things",),
    ]
    captions = _tokens(LabelSet("mixed", tuple(names)), prompt)
    answers = set()
    for seed in range(1, 5):
        model = make_captioner(seed)
        memory_BSD = _memory(model, 25, seed)
        found = LabelTrie(captions).classify(model, memory_BSD).tolist()
        assert found == [_walk_slowly(model, memory_SD, captions) for memory_SD in memory_BSD]
        answers |= set(found)
    assert len(answers) > 3, "the walks end in several classes"


def test_with_labels_of_one_word_both_ways_agree_when_a_word_says_nothing_about_the_next() -> None:
    # Then the prompt and the end cost the same for every label, and the likeliest label is the
    # likeliest word: what greed would have missed is not there. Captions of one length, else the
    # mean over words would favour some.
    model = make_captioner(2)
    model.word_embed.weight.zero_()
    words = [[[token]] for token in range(40, 70)]
    memory_BSD = _memory(model, 40)
    greedy = LabelTrie(words).classify(model, memory_BSD)
    loss_BC = torch.stack(
        [
            caption_losses(model, memory_BSD, torch.tensor([[BOS_ID, w, EOS_ID]]).expand(40, -1))
            for [[w]] in words
        ],
        dim=1,
    )
    assert greedy.tolist() == loss_BC.argmin(1).tolist() and len(set(greedy.tolist())) > 1


@pytest.mark.slow
def test_by_loss_the_class_of_the_likeliest_caption_wins(store: Store) -> None:
    ready = open_made(3)
    labels = LabelSet("shapes", tuple((name, f"{name} thing") for name in LABELS))
    [score] = zero_shot_scores(
        [ready],
        store,
        labels,
        ZeroShotSettings(("loss",), prompt="an image of a"),
        Asking(batch_size=7, workers=1),
    )
    right = 0
    for row in range(store.num_records):
        x_CHW = preprocess(16, ready.data.mean, ready.data.std)(decode(store.read(row)))
        memory_BSD = ready.model.encode(torch.from_numpy(x_CHW)[None])
        losses = [
            min(
                caption_losses(
                    ready.model, memory_BSD, torch.from_numpy(ready.encode(c))[None]
                ).item()
                for c in own
            )
            for own in prompted(labels, "an image of a")
        ]
        right += int(np.argmin(losses)) == store.labels[row]
    assert score.value == right / 60 and score.n == 60
    assert "16 strings" in score.protocol and score.visibility == "public"
    assert score.chance == np.bincount(store.labels).max() / 60


def test_a_model_without_opinions_is_wrong_everywhere(store: Store) -> None:
    ready = open_made()
    ready.model.word_head.weight.zero_(), ready.model.word_head.bias.zero_()
    for score in zero_shot_scores([ready], store, SHAPES, how=Asking(workers=1)):
        assert score.value == 0, score.protocol


def test_a_walk_that_ends_in_a_tie_has_no_answer() -> None:
    model = make_captioner()
    model.word_head.weight[51] = model.word_head.weight[50]
    model.word_head.bias[[50, 51]] = 9.0
    assert LabelTrie([[[50]], [[51]], [[52]]]).classify(model, _memory(model, 3)).tolist() == [
        -1,
        -1,
        -1,
    ]


def test_scores_are_private_when_the_store_or_the_weights_are(tmp_path: Path, store: Store) -> None:
    private = write_scenes(tmp_path / "private", 20, 16, public=False)
    for ready, images, wanted in [
        (open_made(), private, "private"),
        (open_made(confidential=True), store, "private"),
        (open_made(), store, "public"),
    ]:
        assert {
            s.visibility for s in zero_shot_scores([ready], images, SHAPES, how=Asking(workers=1))
        } == {wanted}


def test_the_limit_takes_the_same_images_every_time(store: Store) -> None:
    settings = ZeroShotSettings(("trie",), limit=11)
    first, again = (
        zero_shot_scores([open_made()], store, SHAPES, settings, how=Asking(workers=1))[0]
        for _ in range(2)
    )
    assert first == again and first.n == 11


def test_label_sets_of_the_papers_have_their_classes_in_the_publishers_order() -> None:
    assert len(BUILT_IN["cifar10"]) == 10 and len(BUILT_IN["cifar100"]) == 100 == len(
        set(BUILT_IN["cifar100"])
    )
    # publishers number CIFAR-100's classes by the alphabet
    assert list(BUILT_IN["cifar100"]) == sorted(BUILT_IN["cifar100"])
    if not CIFAR10.exists():
        pytest.skip("no ../shared/data/cifar10")
    assert list(BUILT_IN["cifar10"]) == CIFAR10.read_text().split()


def test_imagenets_names_shared_by_classes_are_accepted() -> None:
    if not IMAGENET.exists():
        pytest.skip("no ../shared/data/imagenet1k_sample")
    # ImageNet has two cranes, a bird and a machine
    lines = IMAGENET.read_text().splitlines()
    assert lines.count("crane") == 2
    assert len(LabelSet("imagenet", tuple((name,) for name in lines)).classes) == 1000


@pytest.mark.parametrize("method", ["trie", "loss"])
def test_a_string_of_several_classes_is_right_for_each_of_them(
    store: Store, method: Method
) -> None:
    """The paper's rule: the answer is a caption, right if it corresponds to the true label."""
    ready, prompt = open_made(3), "an image of a"
    names = [(name, "round thing") if k in (1, 4) else (name,) for k, name in enumerate(LABELS)]
    names[6] = ("Round Thing",)
    strings = list(dict.fromkeys(string.lower() for own in names for string in own))
    [score] = zero_shot_scores(
        [ready],
        store,
        LabelSet("s", tuple(names)),
        ZeroShotSettings((method,), prompt=prompt),
        how=Asking(workers=1),
    )
    captions = [[ready.tokenizer.words(f"{prompt} {string}")] for string in strings]
    fits = np.array(
        [
            [string in [own.lower() for own in names[label]] for label in store.labels]
            for string in strings
        ]
    )
    right = 0
    for row in range(store.num_records):
        x_CHW = preprocess(16, ready.data.mean, ready.data.std)(decode(store.read(row)))
        memory_BSD = ready.model.encode(torch.from_numpy(x_CHW)[None])
        if method == "trie":
            answer = _walk_slowly(ready.model, memory_BSD[0], captions)
        else:
            encoded = [
                torch.from_numpy(ready.encode(f"{prompt} {string}"))[None] for string in strings
            ]
            answer = int(
                np.argmin(
                    [caption_losses(ready.model, memory_BSD, caption).item() for caption in encoded]
                )
            )
        right += int(fits[answer, row])
    assert score.value == right / 60 and 0 < right < 60
    assert score.chance == fits.mean(axis=1).max() > np.bincount(store.labels).max() / 60, (
        "the best constant answer names three classes"
    )
    assert "8 classes of s with 10 strings, 2 of them shared by classes" in score.protocol


def test_any_class_of_a_shared_string_counts_where_several_labels_are_correct(store: Store) -> None:
    ready = open_made(3)
    same = LabelSet("two strings", (*((("a thing",),) * 4), *((("b thing",),) * 4)))
    any_of = AnyOfLabels("real.json", tuple(frozenset({3, 7}) for _ in range(60)))
    [score] = zero_shot_scores(
        [ready], store, same, ZeroShotSettings(("trie",)), any_of=any_of, how=Asking(workers=1)
    )
    assert score.value == score.chance == 1, "both strings stand for a correct class"


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([f"{name}, {name} thing" for name in LABELS]),
        json.dumps([[name, f"{name}_thing"] for name in LABELS]),
        json.dumps(
            {
                str(k): [f"n0000000{k}", name, f"{name} thing"]
                for k, name in reversed(list(enumerate(LABELS)))
            },
            indent=1,
        ),
        json.dumps({name: [name, f"{name} thing"] for name in reversed(LABELS)}),
        "\n".join(f"{name},{name}_thing" for name in LABELS),
    ],
)
@pytest.mark.parametrize("ending", ["json", "txt"])
def test_json_and_text_give_the_same_classes(
    tmp_path: Path, store: Store, text: str, ending: str
) -> None:
    if ending == "json" and text[0] not in "[{":
        pytest.skip("not JSON")
    file = tmp_path / f"labels.{ending}"
    file.write_text(text)
    assert load_label_set(str(file), store).classes == tuple(
        (name, f"{name} thing") for name in LABELS
    )


def test_a_file_of_labels_has_synonyms_between_commas(tmp_path: Path, store: Store) -> None:
    file = tmp_path / "shapes.txt"
    file.write_text(
        "\ufeff" + "\n".join(f"{name}, {name} thing ,{name}" for name in LABELS) + "\n\n",
        encoding="utf-8",
    )
    assert load_label_set(str(file), store).classes[0] == (LABELS[0], f"{LABELS[0]} thing")
    assert load_label_set("store", store).classes == SHAPES.classes


@pytest.mark.parametrize(
    ("prompt", "match", "wanted"),
    [
        (
            "this is a photo of a",
            False,
            ["this is a photo of a apple", "this is a photo of a pear"],
        ),
        (
            "this is  a photo of a ",
            True,
            ["this is a photo of an apple", "this is a photo of a pear"],
        ),
        ("a photo of the", True, ["a photo of the apple", "a photo of the pear"]),
    ],
)
def test_the_article_is_the_papers_unless_asked(
    prompt: str, match: bool, wanted: list[str]
) -> None:
    assert [
        own[0]
        for own in prompted(LabelSet("f", (("apple",), ("pear",))), prompt, match_article=match)
    ] == wanted


def test_bad_labels_get_clear_errors(tmp_path: Path, store: Store) -> None:
    def file(text: str | bytes) -> str:
        path = tmp_path / "labels.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    unlabelled = write_colours(tmp_path / "colours", 5, 0)
    bare, two = replace_labels(unlabelled), LabelSet("two", (("a",), ("b",)))
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (
            lambda: load_label_set("imagenet", store),
            ConfigError,
            "labels: 'imagenet'; expected store, cifar10, cifar100 or a file",
        ),
        (
            lambda: load_label_set("cifar10", store),
            DataError,
            "have other classes, or another order",
        ),
        (lambda: load_label_set(file("a\n\nb"), store), DataError, "line 2 is empty"),
        (lambda: load_label_set(file("a\nb"), store), DataError, "has 2 classes; expected 8"),
        (lambda: load_label_set(file("[1, 2]"), store), DataError, "class 0 is 1; expected a name"),
        (lambda: load_label_set(file('["a", []]'), store), DataError, "class 1 is empty"),
        (
            lambda: load_label_set(file('{"0": "a", "2": "b"}'), store),
            DataError,
            "has '2'; expected as keys class numbers 0 to 1",
        ),
        (lambda: load_label_set(file('{"0": "a", "0": "b"}'), store), DataError, "has '0' twice"),
        (
            lambda: load_label_set(file(json.dumps(dict.fromkeys(LABELS[:7], "a"))), store),
            DataError,
            f"nothing for '{LABELS[7]}'",
        ),
        (
            lambda: load_label_set(file(json.dumps(dict.fromkeys([*LABELS, "8"], "a"))), store),
            DataError,
            "has '8'; expected as keys the",
        ),
        (lambda: load_label_set(file('{"0": '), store), DataError, "expected JSON"),
        (lambda: LabelSet("x", (("a",), ("A",))), DataError, "all 2 classes have the strings a"),
        (
            lambda: load_label_set(file(b"\xff\xfea"), store),
            DataError,
            "expected a text file in UTF-8",
        ),
        (lambda: load_label_set(file(""), store), DataError, "0 classes; expected two or more"),
        (lambda: LabelSet("x", (("a",), ("",))), DataError, "class 1 has an empty string"),
        (lambda: checked_methods(["tree"]), ConfigError, "method='tree'; expected trie or loss"),
        (lambda: checked_methods([]), ConfigError, "expected trie or loss"),
        (lambda: ZeroShotSettings(limit=0), ConfigError, "limit=0; expected at least 1"),
        (lambda: prompted(SHAPES, "  "), ConfigError, "expected text before the label"),
        (lambda: zero_shot_scores([open_made()], bare, SHAPES), DataError, "has no labels"),
        (
            lambda: zero_shot_scores([open_made()], store, two),
            DataError,
            "expected 0 to 1, the classes of two",
        ),
        (
            lambda: zero_shot_scores([open_made(num_tokens=12)], store, SHAPES),
            DataError,
            "tokens; expected at most 12, the longest caption of the model. Shorten the string "
            "of class 0, or the prompt",
        ),
        (  # NFKC folds the ligature: the tokenizer reads both as "fig"
            lambda: zero_shot_scores(
                [open_made()], store, LabelSet("figs", (*SHAPES.classes, ("fig",), ("ﬁg",)))
            ),
            DataError,
            "class 8 .fig. and class 9 .ﬁg. have the same tokens",
        ),
    ]
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()


def replace_labels(store: Store) -> Store:
    """The same store without labels."""
    index = np.array(store.index)
    index["label"] = -1
    return Store(store.path, store.meta | {"label_names": None}, index)  # type: ignore[arg-type]


def test_weights_that_are_not_numbers_are_said(store: Store) -> None:
    ready = open_made()
    ready.model.word_head.bias.fill_(torch.nan)
    for method in ("trie", "loss"):
        with pytest.raises(DataError, match="not finite"):
            zero_shot_scores(
                [ready], store, SHAPES, ZeroShotSettings((method,)), how=Asking(workers=1)
            )  # type: ignore[arg-type]


def test_random_weights_are_near_chance(store: Store) -> None:
    ready = open_made()
    scores = zero_shot_scores(
        [ready, replace(ready.untrained(), tokenizer=ready.tokenizer)],
        store,
        SHAPES,
        how=Asking(workers=1),
    )
    assert [s.name for s in scores] == ["captioner"] * 2 + ["random weights"] * 2
    assert all(s.value < 0.5 for s in scores)
