"""CIDEr of a captioner, with people's and other images' beside it."""

from pathlib import Path

import numpy as np
import pytest

from dpvision.data.importer import import_samples
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import DataError
from dpvision.eval.captions import cider as module
from dpvision.eval.captions.cider import cider_d, cider_scores, people_scores, say_captions
from dpvision.eval.captions.settings import Asking
from dpvision.eval.score import CIDER
from dpvision.models.generate import GenerateSettings
from dpvision.synthetic.scenes import make_scene

from ..labelled import write_colours
from .captioners import open_made


def _five_captions(path: Path, num: int, *, public: bool = True) -> Store:
    """Images of scenes with the sentences of five scenes each; the last has two only."""
    import io

    from PIL import Image

    samples = []
    for i in range(num):
        file = io.BytesIO()
        Image.fromarray(make_scene(i, 16).image).save(file, "PNG")
        sentences = [make_scene(7 * i + k, 16).caption for k in range(5 if i < num - 1 else 2)]
        samples.append(Sample(f"k{i}", file.getvalue(), {"captions": sentences}))
    return import_samples(iter(samples), path, public=public)


def test_the_score_is_cider_of_what_is_said_against_the_stores_captions(tmp_path: Path) -> None:
    store, ready = write_scenes(tmp_path / "s", 12, 16), open_made(4)
    said = say_captions(
        ready, store, np.arange(12), GenerateSettings(max_words=8), Asking(workers=1)
    )
    [score] = cider_scores([ready], store, GenerateSettings(max_words=8), how=Asking(workers=1))
    references = [store.captions(row) for row in range(12)]
    assert (
        score.value == pytest.approx(cider_d([said[row] for row in range(12)], references).mean())
        and score.n == 12
    )
    assert score.chance == pytest.approx(
        cider_d([said[(row + 1) % 12] for row in range(12)], references).mean()
    )
    assert (
        score.low <= score.value <= score.high
        and score.protocol == f"{CIDER}, greedy captions, 1 references, squash"
    )


def test_a_captioner_that_says_the_truth_is_far_above_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = write_scenes(tmp_path / "s", 60, 16)
    monkeypatch.setattr(
        module,
        "say_captions",
        lambda ready, store, row_N, *_, **__: {row: store.captions(row)[0] for row in row_N},
    )
    [score] = cider_scores([open_made()], store)
    assert score.value > 9.9 and score.chance < 1.5


def test_people_are_held_out_one_by_one_among_images_with_as_many_captions(tmp_path: Path) -> None:
    store = _five_captions(tmp_path / "s", 11)
    [score] = people_scores(store, np.arange(11))
    captions = [store.captions(row) for row in range(store.num_records)]
    alike = [own for own in captions if len(own) == 5]
    slowly = [
        [
            cider_d(
                [own[k] for own in alike],
                [[c for j, c in enumerate(own) if j != k] for own in alike],
            )[i]
            for k in range(5)
        ]
        for i in range(len(alike))
    ]
    assert (
        score.n == 10 == len(alike)
        and score.value == pytest.approx(np.mean(slowly))
        and "4 references" in score.protocol
    )
    assert [
        s.name
        for s in cider_scores(
            [open_made()], store, GenerateSettings(max_words=4), how=Asking(workers=1)
        )
    ] == ["captioner", "people"]


def test_private_captions_give_private_scores(tmp_path: Path) -> None:
    store = _five_captions(tmp_path / "s", 5, public=False)
    assert {
        s.visibility
        for s in cider_scores(
            [open_made()], store, GenerateSettings(max_words=3), how=Asking(workers=1)
        )
    } == {"private"}


def test_a_beam_is_named_and_a_limit_takes_the_same_images(tmp_path: Path) -> None:
    store, ready = write_scenes(tmp_path / "s", 20, 16), open_made(4)
    how = GenerateSettings("beam", beams=2, max_words=4)
    first, again = (
        cider_scores([ready], store, how, limit=7, how=Asking(workers=1))[0] for _ in range(2)
    )
    assert (
        first == again
        and first.n == 7
        and "beam captions (2 beams, length penalty 1)" in first.protocol
    )


def test_stores_without_captions_and_drawn_captions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 images with a caption; expected two or more"):
        cider_scores([open_made()], write_colours(tmp_path / "c", 3, 0))
    with pytest.raises(DataError, match="expected greedy or beam"):
        cider_scores([open_made()], write_scenes(tmp_path / "s", 5, 16), GenerateSettings("sample"))
