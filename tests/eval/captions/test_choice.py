"""Choices among captions: planted answers, each item's losses one by one as oracle, intervals that
know of images, the control.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpvision.data.transform import preprocess
from dpvision.errors import DataError
from dpvision.eval.captions.choice import (
    Choice,
    ChoiceTest,
    answer_choices,
    choice_scores,
    clustered_interval,
)
from dpvision.eval.captions.image_source import FileImages, SceneImages, image_batches
from dpvision.eval.captions.settings import Asking
from dpvision.eval.score import wilson_interval
from dpvision.models.captioner import caption_losses
from dpvision.synthetic.scenes import make_scene

from .captioners import open_made

SAID = (
    "a red disc",
    "a blue square",
    "two stars on a pale background",
    "a ring",
    "a striped green heart above a cross",
)


def _test(num_images: int = 6, repeats: int = 3) -> ChoiceTest:
    choices = [
        Choice(
            p, (SAID[(p + r) % 5], *(s for s in SAID[: 2 + r] if s != SAID[(p + r) % 5])), f"g{r}"
        )
        for p in range(num_images)
        for r in range(repeats)
    ]
    return ChoiceTest("toy", SceneImages(range(100, 100 + num_images), 16), tuple(choices))


def test_an_item_is_right_when_its_true_caption_has_the_lowest_training_loss() -> None:
    ready, test = open_made(2), _test()
    right_N = answer_choices(ready, test, Asking(batch_size=4, workers=1))
    prepare = preprocess(16, ready.data.mean, ready.data.std)
    for choice, right in zip(test.choices, right_N.tolist(), strict=True):
        memory_BSD = ready.model.encode(
            torch.from_numpy(prepare(make_scene(100 + choice.image, 16).image))[None]
        )
        losses = [
            caption_losses(ready.model, memory_BSD, torch.from_numpy(ready.encode(c))[None]).item()
            for c in choice.captions
        ]
        assert right == (int(np.argmin(losses)) == 0), (choice, losses)
    assert 0 < right_N.mean() < 1


def test_captions_that_the_model_cannot_tell_apart_are_wrong_whatever_their_place() -> None:
    ready = open_made(num_tokens=6)
    long = "a red disc left of a blue square and a green ring"
    choices = (
        Choice(0, (long, long + " above a star")),
        Choice(1, ("a ring", "A  RING")),
    )  # the same once cut; the same to the tokenizer
    assert answer_choices(
        ready, ChoiceTest("tied", SceneImages((1, 2), 16), choices), how=Asking(workers=1)
    ).tolist() == [0, 0]


def test_dealt_out_asks_every_item_about_another_image_that_has_items() -> None:
    test = _test(3)
    dealt = test.dealt_out()
    assert [c.image for c in dealt.choices] == [1, 1, 1, 2, 2, 2, 0, 0, 0]
    assert [c.captions for c in dealt.choices] == [c.captions for c in test.choices]
    with pytest.raises(DataError, match="expected two or more for the baseline"):
        _test(1).dealt_out()


def test_other_boxes_of_a_photograph_are_not_other_images_and_its_items_are_one_cluster() -> None:
    files = [Path(name) for name in "aaaabbbbc"]  # 4, 4 and 1 boxes
    images = FileImages(
        tuple(files), tuple((0.0, 0.0, 10.0 + i, 10.0) for i in range(9)), "public", "boxes"
    )
    test = ChoiceTest("boxes", images, tuple(Choice(i, SAID[:2]) for i in range(9)))
    shown = [files[choice.image].name for choice in test.dealt_out().choices]
    assert shown == ["b"] * 4 + ["c"] * 4 + ["a"]
    with pytest.raises(DataError, match="about 1 image"):
        replace(test, choices=test.choices[:4]).dealt_out()
    # Equal answers for all boxes of a photograph are one answer for each photograph.
    two = replace(test, choices=test.choices[:8])
    (score,) = choice_scores(two, np.array([1] * 4 + [0] * 4, dtype=np.int8), "captioner", "public")
    assert (score.low, score.high) == pytest.approx(wilson_interval(1, 2))


def test_micro_counts_items_macro_counts_groups_and_small_groups_do_not_count() -> None:
    choices = tuple(
        Choice(
            i,
            ("t", *"abcd"[: 1 if i < 40 else 4]),
            "large" if i < 40 else "small" if i < 50 else "tiny",
        )
        for i in range(52)
    )
    test = ChoiceTest(
        "toy",
        SceneImages(range(52)),
        choices,
        groups_called="kinds",
        min_group=10,
        show_groups=True,
    )
    right_N = np.array([1] * 30 + [0] * 10 + [1] * 2 + [0] * 8 + [1] * 2, dtype=np.int8)
    micro, macro, *groups = choice_scores(test, right_N, "captioner", "public")
    assert (
        micro.value == 34 / 52
        and micro.n == 52
        and micro.chance == pytest.approx((40 / 2 + 12 / 5) / 52)
    )
    assert (
        macro.value == pytest.approx((30 / 40 + 2 / 10) / 2)
        and macro.n == 50
        and macro.chance == pytest.approx((1 / 2 + 1 / 5) / 2)
    )
    assert (
        "macro over 2 kinds of 10 items or more" in macro.protocol
        and macro.low < macro.value < macro.high
    )
    assert {g.protocol.split(", ")[1]: g.value for g in groups} == {
        "large": 0.75,
        "small": 0.2,
        "tiny": 1.0,
    }
    [alone] = choice_scores(
        replace(test, choices=tuple(replace(c, group="") for c in choices)),
        right_N,
        "captioner",
        "public",
    )
    assert alone.value == micro.value and "micro" not in alone.protocol


def test_items_without_an_image_do_not_count_and_the_protocol_says_so() -> None:
    right_N = np.array([1, -1, 0, 1] * 3 + [1] * 6, dtype=np.int8)
    [score, *_] = choice_scores(_test(), right_N, "captioner", "public")
    assert (
        score.n == 15
        and score.value == 12 / 15
        and "3 items without a readable image left out" in score.protocol
    )
    with pytest.raises(DataError, match="no item with a readable image"):
        choice_scores(_test(), np.full(18, -1, dtype=np.int8), "captioner", "public")


def test_the_interval_is_wilsons_for_single_items_and_wider_for_items_that_go_together() -> None:
    right_N = np.array([1, 0, 1, 1] * 50)
    assert clustered_interval(right_N, np.arange(200)) == pytest.approx(
        wilson_interval(150, 200), abs=2e-3
    )
    # five equal answers for each image are one answer
    together = clustered_interval(np.repeat(right_N, 5), np.repeat(np.arange(200), 5))
    assert together == pytest.approx(wilson_interval(150, 200), abs=2e-3)
    low, high = clustered_interval(np.ones(50, dtype=np.int64), np.repeat(np.arange(10), 5))
    assert (low, high) == pytest.approx(wilson_interval(10, 10))


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.Generator(np.random.PCG64(0))
    covered = 0
    for _ in range(400):
        share_P = rng.beta(4, 2, 60)  # images differ, their five items agree in part
        low, high = clustered_interval(
            (rng.uniform(size=(60, 5)) < share_P[:, None]).astype(np.int64).ravel(),
            np.repeat(np.arange(60), 5),
        )
        covered += low <= 2 / 3 <= high
    assert 0.92 <= covered / 400 <= 0.98  # 95% +- 2.3 standard deviations of 400 trials


def test_a_file_that_is_no_image_is_not_an_item(tmp_path: object) -> None:

    from PIL import Image

    folder = Path(str(tmp_path))
    (folder / "bad.png").write_bytes(b"no image")
    Image.fromarray(make_scene(3).image).save(folder / "good.png")
    images = FileImages(
        (folder / "bad.png", folder / "good.png"), (None, (0, 0, 20, 40)), "public", "files"
    )
    test = ChoiceTest("files", images, (Choice(0, SAID[:2]), Choice(1, SAID[:2])))
    assert answer_choices(open_made(), test, how=Asking(workers=1))[0] == -1
    assert answer_choices(open_made(), test, how=Asking(workers=1))[1] >= 0


def test_a_box_and_its_fit_decide_what_is_seen(tmp_path: object) -> None:
    from pathlib import Path

    from PIL import Image

    from dpvision.config import DataConfig

    file = Path(str(tmp_path)) / "halves.png"
    pixels = np.zeros((40, 80, 3), dtype=np.uint8)
    pixels[:, 40:] = 255  # black left, white right
    Image.fromarray(pixels).save(file)
    data = DataConfig(mean=(0, 0, 0), std=(1, 1, 1))

    def seen(box: tuple[float, float, float, float] | None, fit: str) -> torch.Tensor:
        [(x_BCHW, _)] = image_batches(
            FileImages((file,), (box,), "public", ""), data, 8, fit, workers=1
        )  # type: ignore[arg-type]
        return x_BCHW[0, 0]

    assert seen((40, 0, 80, 40), "squash").min() == 1 and seen((-5, 0, 40, 90), "squash").max() == 0
    assert seen(None, "squash")[:, 0].max() == 0 and seen(None, "squash")[:, -1].min() == 1, (
        "all of it"
    )
    assert seen((0, 0, 60, 40), "crop")[0].mean() < seen((0, 0, 60, 40), "squash")[0].mean(), (
        "the centre of the box is blacker than the box"
    )


def test_bad_items_get_clear_errors() -> None:
    for captions in (("one",), ("one", " ")):
        with pytest.raises(DataError, match="expected two or more, none of them empty"):
            answer_choices(open_made(), ChoiceTest("t", SceneImages((1,)), (Choice(0, captions),)))
    ready = open_made()
    ready.model.word_head.bias.fill_(torch.nan)
    with pytest.raises(DataError, match="not finite"):
        answer_choices(ready, _test(2), how=Asking(workers=1))
