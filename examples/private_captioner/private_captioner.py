"""A private captioner: a warm start on public captions that name five colours, then private
captions that name ten.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from dpvision.data.synthetic_store import write_scenes
from dpvision.data.tokenizer import scene_captions, train_tokenizer
from dpvision.eval.captions.cider import say_captions
from dpvision.eval.captions.open_captioner import open_captioner
from dpvision.models.generate import GenerateSettings
from dpvision.recipes import RECIPES
from dpvision.train.loop import fit
from dpvision.train.start import new_session

HERE, NUM, KNOWN = Path(__file__).parent, 6000, ("red", "yellow", "green", "cyan", "black")


def caption(scene):
    return f"a {scene.main.colour} {scene.main.shape}"


private = write_scenes(
    HERE / "stores/private", NUM, 32, first=3 * NUM, caption_of=caption, public=False
)
known = write_scenes(
    HERE / "stores/known",
    NUM,
    32,
    first=NUM,
    caption_of=caption,
    keep=lambda scene: scene.main.colour in KNOWN,
)
test = write_scenes(
    HERE / "stores/test",
    400,
    32,
    first=2 * NUM,
    caption_of=caption,
    keep=lambda scene: scene.main.colour not in KNOWN,
)
words = HERE / "stores/words.json"
train_tokenizer(scene_captions(4000), RECIPES["demo"]().model.vocab_size).save(
    words
)  # public sentences have every word
for name, store, parent in (
    ("demo.start", known, None),
    ("demo", private, str(HERE / "runs/demo.start")),
):
    config = RECIPES[name]()
    data = replace(config.data, store=str(store.path), tokenizer=str(words))
    size = replace(config.privacy, dataset_size=known.num_records)
    if parent:  # fewer records and steps than the recipe has: twice its epsilon
        size = replace(config.privacy, dataset_size=NUM, steps=30, target_epsilon=8.0)
    with new_session(
        replace(config, data=data, privacy=size, init_from=parent), HERE / "runs" / name
    ) as session:
        fit(session)
        epsilon = session.plan.spent(session.run.ledger.steps).epsilon
    said = say_captions(
        open_captioner(HERE / "runs" / name),
        test,
        np.arange(test.num_records),
        GenerateSettings(),
    )
    right = sum(
        test.captions(row)[0].split()[1] in text.split() for row, text in said.items()
    ) / len(said)
    guarantee = f"epsilon {epsilon:.2f}" if parent else "public"
    print(
        f"{name} ({guarantee}): says {said[0]!r} of {test.captions(0)[0]!r}; new colours named "
        f"right in {right:.1%} of captions"
    )
