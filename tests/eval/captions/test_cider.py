"""CIDEr-D: the reference implementation and its Java tokeniser where they are installed, laws, and
people.
"""

import json
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from dpvision.errors import DataError
from dpvision.eval.captions.cider import cider_d, cider_d_of_words, words
from dpvision.synthetic.scenes import make_scene

FLICKR = Path(__file__).parents[4] / "shared" / "data" / "flickr8k"
# What the reference throws away after tokenising (pycocoevalcap/tokenizer).
PUNCTUATION = {
    "''",
    "'",
    "``",
    "`",
    "-LRB-",
    "-RRB-",
    "-LCB-",
    "-RCB-",
    ".",
    "?",
    "!",
    ",",
    ":",
    "-",
    "--",
    "...",
    ";",
}


def _flickr(part: str = "test") -> list[tuple[str, ...]]:
    """Five captions each."""
    if not FLICKR.exists():
        pytest.skip("no ../shared/data/flickr8k")
    found = []
    with tarfile.open(FLICKR / f"{part}-000000.tar") as tar:
        for member in tar:
            if member.name.endswith(".json") and (file := tar.extractfile(member)) is not None:
                found.append(tuple(json.load(file)["captions"]))
    return found


def _scenes(num: int) -> list[tuple[str, ...]]:
    """Sentences of scenes, three of them as if they were of one image."""
    return [tuple(make_scene(3 * i + k, 16).caption for k in range(3)) for i in range(num)]


def _reference(captions: list[list[str]], references: list[list[list[str]]]) -> np.ndarray:
    cider = pytest.importorskip("pycocoevalcap.cider.cider")
    told = {i: [" ".join(own)] for i, own in enumerate(captions)}
    truth = {i: [" ".join(text) for text in own] for i, own in enumerate(references)}
    return np.asarray(cider.Cider().compute_score(truth, told)[1])


@pytest.mark.parametrize("source", [_scenes(40), "flickr"], ids=["scenes", "flickr8k"])
def test_scores_are_those_of_the_reference_code(source: list[tuple[str, ...]] | str) -> None:
    people = [own[:5] for own in (_flickr()[:200] if isinstance(source, str) else source)]
    rng = random.Random(0)
    split = [[words(text) for text in own] for own in people]
    references = [
        own[1:] if i % 7 else own[1:2] for i, own in enumerate(split)
    ]  # not all with the same number
    captions = [own[0] for own in split]
    captions[2] = references[2][0]
    captions[3], captions[4], captions[5] = (
        [],
        ["xyzzy", "plugh"],
        captions[5] * 3,
    )  # nothing, unknown words, much too long
    captions[6:20] = [rng.sample(own, len(own)) for own in captions[6:20]]
    captions[20:30] = captions[21:31]
    found, wanted = cider_d_of_words(captions, references), _reference(captions, references)
    assert np.abs(found - wanted).max() < 1e-9 and wanted.max() > 1 > wanted.min()


def test_words_are_those_of_the_java_tokeniser(tmp_path: Path) -> None:
    package = pytest.importorskip("pycocoevalcap.tokenizer.ptbtokenizer")
    java = shutil.which("java")
    if java is None:
        pytest.skip("no java")
    captions = [text for own in _flickr() for text in own]
    captions += [make_scene(i, 16).caption for i in range(200)]
    captions += [
        "I don't know (maybe) what he's doing -- really...",
        "a U.S. flag in Washington D.C. with Mr. Smith on St. Louis Ave.",
        "and/or 1/2 of 3,000 things at 10:30 a.m. for $5.99 & 50% #1",
        "a close-up; 20-year-old: t-shirt! why? [box] {curly}",
        "the dogs' bowls, a child's \"toy\" and they'll can't cannot gonna",
        "A man and 'his' dog . Two dogs .",
        "café naïve",
    ]
    file = tmp_path / "captions.txt"
    file.write_text("\n".join(captions), encoding="utf-8")
    jar = Path(str(package.__file__)).parent / package.STANFORD_CORENLP_3_4_1_JAR
    command = [
        java,
        "-cp",
        str(jar),
        "edu.stanford.nlp.process.PTBTokenizer",
        "-preserveLines",
        "-lowerCase",
        "-encoding",
        "utf-8",
        str(file),
    ]
    out = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\n")
    wrong = [
        (caption, words(caption), line)
        for caption, line in zip(captions, out, strict=False)
        if words(caption) != [word for word in line.split() if word not in PUNCTUATION]
    ]
    assert len(out) >= len(captions) and not wrong, wrong[:5]


@pytest.mark.parametrize(
    ("caption", "wanted"),
    [
        ("A dog's ball isn't red.", "a dog 's ball is n't red"),
        ('Two men , in the "park" .', "two men in the park"),
        ("It's 10:30 -- time for tea...", "it 's 10:30 time for tea"),
        ("a close-up (blurry)", "a close-up -lrb- blurry -rrb-"),
        ("", ""),
        ("?!", ""),
    ],
)
def test_words_without_java(caption: str, wanted: str) -> None:
    assert words(caption) == wanted.split()


def test_a_caption_that_all_references_are_gets_ten_and_one_that_shares_no_word_nothing() -> None:
    people = [
        ("one red disc over there",) * 2,
        ("two blue squares and stars",) * 2,
        ("green ring below heart small",) * 2,
    ]
    assert cider_d([own[0] for own in people], people) == pytest.approx(10)
    assert cider_d(["nothing of this kind"] * 3, people) == pytest.approx(0)


def test_the_order_of_images_and_of_references_does_not_matter() -> None:
    people = _scenes(20)
    captions = [make_scene(5000 + i, 16).caption for i in range(20)]
    found, order = (
        cider_d(captions, people),
        np.random.Generator(np.random.PCG64(0)).permutation(20),
    )
    assert cider_d([captions[i] for i in order], [people[i][::-1] for i in order]) == pytest.approx(
        found[order], abs=1e-12
    )
    assert found.min() >= 0 and found.max() <= 10


def test_repeating_a_caption_does_not_help() -> None:
    # what the D is for: counts are clipped at the reference's, and another length costs
    people = _scenes(20)
    once = cider_d([own[0] for own in people], people)
    twice = cider_d([f"{own[0]} {own[0]}" for own in people], people)
    assert (twice < once).all()


def test_a_persons_caption_fits_its_image_far_better_than_another() -> None:
    people = _flickr()[:300]
    references, own = [captions[1:] for captions in people], [captions[0] for captions in people]
    right, wrong = cider_d(own, references), cider_d([*own[1:], own[0]], references)
    assert right.mean() > 10 * wrong.mean() and (right > wrong).mean() > 0.9


def test_too_little_to_score_is_said() -> None:
    for captions, references, said in [
        (["a"], [["a"]], "1 captions for 1 images; expected one each, of two images or more"),
        (["a", "b"], [["a"]], "2 captions for 1 images"),
        (["a", "b"], [["a"], []], "image 1 has no reference"),
    ]:
        with pytest.raises(DataError, match=said):
            cider_d(captions, references)
