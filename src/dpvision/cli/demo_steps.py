"""The steps of ``dpvision demo``."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpvision.adapt.session import adapt, new_head_session
from dpvision.cli.output import emit
from dpvision.cli.recipe import get_recipe
from dpvision.cli.run_args import STOPPED
from dpvision.cli.scores import scores_table
from dpvision.config import HeadConfig, RunConfig
from dpvision.data.declared import rounded_up
from dpvision.data.decode import decode
from dpvision.data.import_labels import ClassRule
from dpvision.data.importer import import_source
from dpvision.data.open import open_store
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.encoders.headed import load_classifier
from dpvision.errors import OPERATOR_ONLY, DataError
from dpvision.eval.probes.own_head import score_own_head
from dpvision.eval.probes.suite import evaluate
from dpvision.eval.score import Score
from dpvision.eval.score_file import NOTHING_FITTED, write_scores
from dpvision.privacy.planner import what_if
from dpvision.report.examples import save_examples
from dpvision.report.operator_page import make_operator_page
from dpvision.report.page import make_report
from dpvision.synthetic.scenes import LABELS
from dpvision.train.loop import fit
from dpvision.train.start import new_session

# Scene numbers: the private part and the public parts are different scenes of the same kind.
_FIRST_PRIVATE, _FIRST_TRAIN, _FIRST_TEST, _FIRST_LABELLED = 0, 10_000_000, 20_000_000, 30_000_000
_NUM_TRAIN, _NUM_TEST, _NUM_LABELLED = 4000, 2000, 4000
_NUM_EXAMPLES = 12
_CLASSIFIER_EPSILON = 3.0


def run_demo(data: Path | None, stores: Path, runs: Path, *, json: bool) -> None:
    """What ``dpvision demo`` does after its arguments are parsed."""
    start = time.monotonic()

    def say(text: str) -> None:
        print(text, file=sys.stderr if json else sys.stdout, flush=True)

    config = get_recipe("demo")
    size = config.model.encoder.image_size
    say("1/6  Images")
    if data is None:
        private = _scenes(stores / "demo-private", config.privacy.dataset_size, _FIRST_PRIVATE, size, public=False)
    else:
        private = _imported(data, stores)
    probe_train = _scenes(stores / "demo-public-train", _NUM_TRAIN, _FIRST_TRAIN, size, public=True)
    probe_test = _scenes(stores / "demo-public-test", _NUM_TEST, _FIRST_TEST, size, public=True)
    label = "" if data is None else OPERATOR_ONLY
    say(f"     {label}{private.num_records:,} private records in {private.path}, {_NUM_TRAIN + _NUM_TEST:,} public scenes beside them")

    say("2/6  Plan: what can this data set afford?")
    config = _fitted(config, private)
    root = _free_name(runs)
    with new_session(config, root) as session:
        plan = session.plan
        say(f"     epsilon {plan.epsilon:.4g} at delta {plan.delta:.2g}: noise multiplier {plan.noise_multiplier:.4g}, {plan.steps} steps")
        if word := what_if(config.privacy, num_parameters=sum(p.numel() for p in session.model.parameters()))["advice"]:
            say(f"     {word}")
        say("3/6  Private training (Ctrl-C saves and stops; the ledger stays true)")
        if not fit(session):
            say(f"     Stopped and saved: dpvision train demo --name {root.name} --runs {runs} --resume goes on.")
            sys.exit(STOPPED)
    say("4/6  Probe on public scenes")
    scores = evaluate(root, probe_train, probe_test)
    write_scores(root, scores, train_data=probe_train.path.name, test_data=probe_test.path.name)
    say(scores_table(scores))
    say(f"     {_verdict(scores)}")
    say("5/6  A private classifier, from features that cost no privacy")
    classifier = _classifier(config, stores, runs, probe_test, say) if data is None else None
    if data is not None:
        say("     Your images have no declared classes here: docs/adapt.md has the two commands for a classifier of your own.")
    say("6/6  Statement and report")
    page = make_report(root, probe_test.path, store_dir=private.path, tuning="public")
    operator = make_operator_page(root, private.path)
    result = {
        "run": str(root), "epsilon": plan.epsilon, "delta": plan.delta, "report": str(page), "operator_page": str(operator),
        "statement": str(root / "statement.json"), "scores": [s.to_dict() for s in scores], "classifier": classifier,
        "seconds": time.monotonic() - start,
    }  # fmt: skip
    text = [f"Done in {(time.monotonic() - start) / 60:.1f} minutes. Open {page} in a browser; {operator} is for your eyes only."]
    text.append(f"Then: dpvision ledger {private.path}   python -c 'import dpvision; print(dpvision.load(\"{root}\"))'")
    emit(result, json, "\n".join(text))


def _classifier(config: RunConfig, stores: Path, runs: Path, test: Store, say: Callable[[str], None]) -> dict[str, Any]:
    """A private head on patches of textures, fitted to labelled scenes of its own: its run, its scores and a sheet of examples."""
    labelled = _scenes(stores / "demo-labelled", _NUM_LABELLED, _FIRST_LABELLED, config.model.encoder.image_size, public=False)
    head = get_recipe("transfer.auto")
    assert isinstance(head.model, HeadConfig)
    head = replace(
        head, model=replace(head.model, num_classes=len(LABELS)), data=replace(head.data, store=str(labelled.path)),
        privacy=replace(head.privacy, dataset_size=_NUM_LABELLED, expected_batch_size=_NUM_LABELLED, target_epsilon=_CLASSIFIER_EPSILON),
    )  # fmt: skip
    root = _free_name(runs, "demo-classifier")
    with new_head_session(head, root) as session:
        epsilon, delta = session.plan.epsilon, session.plan.delta
        say(f"     {_NUM_LABELLED:,} private scenes with labels, {len(LABELS)} classes, epsilon {epsilon:.4g} at delta {delta:.2g}")
        adapt(session)
    scores = score_own_head(root, test)
    write_scores(root, scores, train_data=NOTHING_FITTED, test_data=test.path.name)
    score = scores[0]
    say(f"     {score.value:.1%} of {score.n:,} public scenes right ({score.low:.1%} to {score.high:.1%}), {score.chance:.1%} by chance")
    classifier = load_classifier(root)
    rows = np.arange(_NUM_EXAMPLES)
    images = [decode(test.read(int(row))) for row in rows]
    with torch.inference_mode():
        found = classifier(torch.from_numpy(np.stack([classifier.preprocess(image) for image in images]))).argmax(dim=1).tolist()
    names = [LABELS[k] for k in found], [LABELS[k] for k in test.labels[rows].tolist()]
    sheet = save_examples(root / "examples.png", np.stack(images), *names)
    make_report(root, store_dir=labelled.path, tuning="public")
    say(f"     {sheet} shows {_NUM_EXAMPLES} of them, {root / 'report.html'} is its statement")
    return {"run": str(root), "epsilon": epsilon, "scores": [s.to_dict() for s in scores], "examples": str(sheet)}


def _scenes(folder: Path, num: int, first: int, size: int, *, public: bool) -> Store:
    if folder.exists():
        store = open_store(folder)
        if store.num_records != num:
            raise DataError(f"demo: {folder} holds {store.num_records} records; expected {num} scenes. Remove it, or use another --stores.")
        return store
    return write_scenes(folder, num, size, first=first, public=public)


def _imported(data: Path, stores: Path) -> Store:
    folder = stores / f"demo-{data.resolve().stem}"
    return open_store(folder) if folder.exists() else import_source(data, folder, classes=ClassRule(unknown="unlabelled"))


def _fitted(config: RunConfig, store: Store) -> RunConfig:
    """The demo's settings on a store of another size: the same number of steps on a tenth of the records each, at most."""
    num = rounded_up(store.num_records)
    privacy = replace(config.privacy, dataset_size=num, expected_batch_size=min(config.privacy.expected_batch_size, max(1, num // 4)))
    return replace(config, privacy=privacy, data=replace(config.data, store=str(store.path)))


def _verdict(scores: list[Score]) -> str:
    """What the linear probe on quadrants says of the encoder against random weights, by the intervals."""
    by_name = {s.name: s for s in scores if s.protocol == "linear probe, 2x2"}
    encoder, chance = by_name["encoder"], by_name["random weights"]
    if encoder.low > chance.high:
        return "The encoder is ahead of random weights."
    if encoder.high < chance.low:
        return "The encoder is behind random weights: the noise cost more than training gave."
    return (
        "The encoder cannot be told from random weights here: a few minutes of private training from scratch are too little to learn "
        "features that a probe sees, though it fills in masked patches (the report shows them). docs/log.md has what more gives."
    )


def _free_name(runs: Path, name: str = "demo") -> Path:
    number = 1
    while (root := runs / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return root
