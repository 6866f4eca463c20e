"""A private captioner: a warm start on public captions that name no colour, then private captions that do."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from dpvision.data.caption_text import store_captions
from dpvision.data.synthetic_store import write_scenes
from dpvision.data.tokenizer import train_tokenizer
from dpvision.eval.captions.cider_scores import say_captions
from dpvision.eval.captions.open_captioner import open_captioner
from dpvision.models.generate import GenerateSettings
from dpvision.recipes import RECIPES
from dpvision.train.loop import fit
from dpvision.train.start import new_session

HERE, NUM = Path(__file__).parent, 4000


def colour_and_shape(scene):
    return f"{scene.main.colour} {scene.main.shape}"


private = write_scenes(HERE / "stores/private", NUM, 32, caption_of=colour_and_shape, public=False)
plain = write_scenes(HERE / "stores/plain", NUM, 32, first=NUM, caption_of=lambda scene: scene.main.shape)
test = write_scenes(HERE / "stores/test", 200, 32, first=2 * NUM, caption_of=colour_and_shape)
words = HERE / "stores/words.json"
train_tokenizer(store_captions(test), RECIPES["demo"]().model.vocab_size).save(words)  # every word of the private captions, from public ones
for name, store, parent in (("demo.start", plain, None), ("demo", private, str(HERE / "runs/demo.start"))):
    config = RECIPES[name]()
    data, size = replace(config.data, store=str(store.path), tokenizer=str(words)), replace(config.privacy, dataset_size=NUM)
    with new_session(replace(config, data=data, privacy=size, init_from=parent), HERE / "runs" / name) as session:
        fit(session)
        epsilon = session.plan.spent(session.ledger.steps).epsilon
    said = say_captions(open_captioner(HERE / "runs" / name), test, np.arange(test.num_records), GenerateSettings(), "squash")
    right = sum(test.captions(row)[0].split()[0] in text.split() for row, text in said.items()) / len(said)
    print(f"{name}: says {said[0]!r} of {test.captions(0)[0]!r}; colour named in {right:.1%} of captions, epsilon {epsilon or 0:.2f}")
