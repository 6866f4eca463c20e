"""CLIP and SigLIP in the tests of captioners: transformers' logits_per_image are the oracle."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_samples
from dpvision.data.sources import Sample
from dpvision.errors import CheckpointError, ConfigError
from dpvision.eval.captions.choice import Choice, ChoiceTest, answer_choices
from dpvision.eval.captions.image_source import StoreImages, image_batches
from dpvision.eval.captions.label_sets import LabelSet
from dpvision.eval.captions.settings import Asking, CaptionTests, ChoiceFiles
from dpvision.eval.captions.suite import make_tests, score_captioner
from dpvision.eval.captions.two_tower import open_asker
from dpvision.eval.captions.zero_shot import ZeroShot, ZeroShotSettings

from ...captioners import COLOURS, image
from ...hub_folders import write_folder, write_tokenizer

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

KINDS = {"clip": "CLIPModel", "siglip": "SiglipModel"}
HOW = Asking("own preprocessing", other_images=False, batch_size=5)
PROMPT = "this is a photo of a"


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("hub") / request.param, request.param)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    samples = []
    for number in range(12):
        file = io.BytesIO()
        Image.fromarray(image(number, 48)[0]).resize((60, 48)).save(file, "PNG")
        samples.append(Sample(f"square-{number}", file.getvalue(), {"label": number % 4}))
    return import_samples(
        samples,
        tmp_path_factory.mktemp("stores") / "squares",
        public=True,
        labels=LabelRule(label_from="label"),
    )


def _logits(folder, images: list[Image.Image], texts: list[str]) -> torch.Tensor:
    """Return transformers' logits of every text for every image."""
    kind = next(kind for kind in KINDS if kind in folder.name)
    model = getattr(transformers, KINDS[kind]).from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = dict(tokenizer(texts, padding="max_length", max_length=24, return_tensors="pt"))
    asked = ("input_ids", "attention_mask") if kind == "clip" else ("input_ids",)
    with torch.no_grad():
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        return model(pixel_values=pixels, **{n: words[n] for n in asked}).logits_per_image


def _opened(store) -> list[Image.Image]:
    return [
        Image.open(io.BytesIO(store.record(row).image)).convert("RGB")
        for row in range(store.num_records)
    ]


def test_the_order_of_candidates_is_that_of_transformers_logits(folder, store):
    texts = [f"{PROMPT} {colour} square" for colour in COLOURS] + ["left", "right"]
    asker, logits_BC = open_asker(f"hf:{folder}"), _logits(folder, _opened(store), texts)
    source = StoreImages(store, np.arange(store.num_records))
    parts = image_batches(source, asker.data, asker.image_size, "own preprocessing")
    image_BD = torch.cat([asker.look(x_BCHW) for x_BCHW, _ in parts])
    token_CL = torch.from_numpy(np.stack([asker.encode(text) for text in texts]))
    loss_BC = asker.losses(image_BD, token_CL.expand(len(image_BD), -1, -1))
    scale, bias = asker.model.logit_scale.exp(), getattr(asker.model, "logit_bias", 0.0)
    assert (-loss_BC * scale + bias - logits_BC).abs().max() <= 1e-5 * max(1, scale)
    apart = asker.losses(image_BD, token_CL.repeat(len(image_BD), 1, 1))
    assert torch.allclose(apart, loss_BC, atol=1e-6)
    token_CL[2] = 0
    assert torch.isinf(asker.losses(image_BD[:1], token_CL[None])[0, 2])


def test_zero_shot_answers_are_the_largest_logits(folder, store):
    labels = LabelSet("colours", tuple((f"{colour} square",) for colour in COLOURS))
    scores = score_captioner(
        f"hf:{folder}", [ZeroShot(store, labels, ZeroShotSettings(prompt=PROMPT))], HOW
    )[0].scores
    logits_BC = _logits(
        folder, _opened(store), [f"{PROMPT} {names[0]}" for names in labels.classes]
    )
    right = (logits_BC.argmax(1).numpy() == store.labels).mean()
    assert [score.name for score in scores] == [f"hf:{folder.name}", "random weights"]
    assert scores[0].value == pytest.approx(right) and scores[0].n == 12
    assert "highest cosine, 4 classes" in scores[0].protocol
    assert "own preprocessing" in scores[0].protocol and scores[0].visibility == "public"


def test_choices_are_the_largest_logits(folder, store):
    captions = [(f"a {colour} square", "a square on the left", "red") for colour in COLOURS]
    choices = tuple(Choice(row, captions[row % 4]) for row in range(12))
    test = ChoiceTest("words", StoreImages(store, np.arange(12)), choices)
    right_N = answer_choices(open_asker(f"hf:{folder}"), test, HOW)
    images = _opened(store)
    for row, choice in enumerate(choices):
        logits_1C = _logits(folder, [images[row]], list(choice.captions))
        assert right_N[row] == (logits_1C.argmax() == 0)
    same = ChoiceTest("ties", test.images, (Choice(0, ("a red square", "a red square")),))
    assert answer_choices(open_asker(f"hf:{folder}"), same, HOW).tolist() == [0]


def test_squashed_images_are_read_as_for_captioners(folder, store):
    labels = LabelSet("colours", tuple((colour,) for colour in COLOURS))
    test = ZeroShot(store, labels)
    made = [
        score_captioner(f"hf:{folder}", [test], Asking(fit), untrained=False)[0].scores[0].protocol
        for fit in ("squash", "crop")
    ]
    assert made[0].endswith(", squash") and made[1].endswith(", crop")


def test_what_needs_a_captioner_is_refused(folder, store):
    asker = open_asker(f"hf:{folder}")
    with pytest.raises(ConfigError, match=r"generates no text\. Drop --captions"):
        make_tests(asker, CaptionTests(captions=True), ChoiceFiles(), store)
    labels = LabelSet("colours", tuple((colour,) for colour in COLOURS))
    with pytest.raises(ConfigError, match="Omit --method"):
        ZeroShot(store, labels, ZeroShotSettings(("trie",))).run([asker], HOW)
    with pytest.raises(ConfigError, match="--ema"):
        open_asker(f"hf:{folder}", ema=True)


def test_a_folder_without_a_text_tower_or_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="model_type='vit'; expected one of clip, siglip"):
        open_asker(f"hf:{write_folder(tmp_path / 'vit', 'vit')}")
    folder = write_folder(tmp_path / "clip", "clip")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer \(none of tokenizer\.json"):
        open_asker(f"hf:{folder}")
    write_tokenizer(folder, vocab_size=700)
    with pytest.raises(CheckpointError, match="entries for 400"):
        open_asker(f"hf:{folder}")
