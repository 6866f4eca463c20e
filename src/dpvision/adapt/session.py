"""A run of a private head: folder, ledger, features once, releases charged one by one, checkpoint.

    with new_head_session(config, root) as session:
        adapt(session)

Killed at any moment, the ledger is true: what is charged and lost stays charged. A run that goes on (``resumed_head_session``) has new
keys and the releases that are left; where these are too few for its head, it says so and stops.

Legend: N records, D feature dimensions.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.fit import Fitted, choose_head, fit_head
from dpvision.adapt.frequency import frequency_scale
from dpvision.adapt.prepare import Prepared, prepare
from dpvision.adapt.release import Releases
from dpvision.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from dpvision.config import RunConfig, to_dict
from dpvision.encoders.centre import texture_centre
from dpvision.encoders.feature_file import feature_array
from dpvision.encoders.identity import check_same, describe
from dpvision.errors import CheckpointError, DataError, DPVisionError, PrivacyError
from dpvision.files import write_json
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import DPPlan
from dpvision.train.folder import RunFolder, create_run, discard_run, open_run, read_run, require_space
from dpvision.train.lineage import own_entry, runs_on
from dpvision.train.log import EpsilonMeter
from dpvision.train.loop import Secrets
from dpvision.train.stop import StopRequest
from dpvision.train.unprotected import remember_weights
from dpvision.train.versions import code_versions

ENCODER_FILE = "encoder.json"
"""What the run's encoder was when it started; public."""
_BLOCK = 1 << 16


@dataclass
class HeadSession:
    """Everything one start of a run works with."""

    prepared: Prepared
    folder: RunFolder
    ledger: Ledger
    about_encoder: dict[str, Any]
    finished: bool = False
    """A checkpoint is there: nothing is left to do."""
    charged_before: int = field(init=False)
    """Steps that earlier starts were charged."""

    def __post_init__(self) -> None:
        self.charged_before = self.ledger.steps

    def unsaved(self) -> int:
        """Releases that are charged and in no checkpoint."""
        return 0 if self.finished else self.ledger.steps

    @property
    def config(self) -> RunConfig:
        return self.prepared.config

    @property
    def plan(self) -> DPPlan:
        return self.prepared.plan


@contextlib.contextmanager
def new_head_session(config: RunConfig | Prepared, root: Path) -> Iterator[HeadSession]:
    """A session for a new run in folder ``root``.

    Raises:
        DPVisionError: anything that makes the run impossible or unsafe; nothing has been charged then.
    """
    made = config if isinstance(config, Prepared) else prepare(config)
    plan, store = made.plan, made.store
    require_space(root, 8 * made.model.num_parameters)
    encoder = describe(made.encoder, made.model.encoder.pooling or "", made.model.encoder.width, made.device)
    about = {
        "store_id": store.store_id, "store_visibility": store.visibility, "results_visibility": store.results_visibility,
        "guarantee": plan.guarantee,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        secluded = store.visibility == "private" or made.encoder.confidential
        folder = create_run(root, made.config, about, wholly_confidential=plan.guarantee != "dp" and secluded)
        stack.callback(folder.close)
        try:
            write_json(folder.base / "plan.json", plan.to_dict())
            write_json(folder.base / ENCODER_FILE, encoder)
            ledger = stack.enter_context(Ledger.open(store.path, folder.run_id, plan, resume=False, lineage=made.lineage))
        except DPVisionError:
            (folder.base / ENCODER_FILE).unlink(missing_ok=True)
            discard_run(folder)  # refused, by the owner's cap say: the name stays free
            raise
        yield HeadSession(made, folder, ledger, encoder)


@contextlib.contextmanager
def resumed_head_session(root: Path, hardware: dict[str, Any] | None = None) -> Iterator[HeadSession]:
    """The session of an existing run: its own config, plan and encoder, the ledger's count, new keys.

    Args:
        hardware: HardwareConfig fields to change: the only settings that a resumed run may change.

    Raises:
        PrivacyError: what is left of the plan is too little for a head.
        DPVisionError: the run, its ledger, its encoder or its store do not fit together.
    """
    base, config, about = read_run(root)
    made = prepare(replace(config, hardware=replace(config.hardware, **(hardware or {}))), _read_plan(base))
    if made.store.store_id != about["store_id"]:
        raise DataError(f"store: {config.data.store} is not the store of this run. Put the original back, or start a new run.")
    encoder = _read_json(base / ENCODER_FILE)
    check_same(made.encoder, encoder, str(root), made.device)
    with contextlib.ExitStack() as stack:
        folder = open_run(root)
        stack.callback(folder.close)
        ledger = stack.enter_context(Ledger.open(made.store.path, folder.run_id, made.plan, resume=True, lineage=made.lineage))
        finished = bool(list_checkpoints(base))
        if finished and load_checkpoint(base).manifest["ledger_steps"] > ledger.steps:
            raise PrivacyError(
                f"ledger: {ledger.steps} steps, fewer than the run's checkpoint has; expected the newer ledger. Restore the LEDGERS folder."
            )
        if not finished and made.plan.steps - ledger.steps < made.releases_needed:
            raise PrivacyError(
                f"adapt: {ledger.steps} of {made.plan.steps} releases of {root} were charged, and lost before the head was saved; expected "
                f"{made.releases_needed} left for {made.model.head}. They count in epsilon for ever. Start a new run under another --name: "
                "its epsilon comes on top (`dpvision ledger STORE` adds up)."
            )
        yield HeadSession(made, folder, ledger, encoder, finished)


def adapt(session: HeadSession, *, secrets: Secrets | None = None, progress: Callable[[int], None] | None = None) -> Path:
    """Features, releases, head, checkpoint.

    Args:
        secrets: two keys, new for this start; tests inject them.
        progress: called with the number of records whose features are done.

    Returns:
        The checkpoint's folder.

    Raises:
        DataError: no record has features that are finite, or the disk has no room for them; nothing has been charged then.
        CheckpointError: the checkpoint cannot be written.
        KeyboardInterrupt: while features are made; after the first release only by a second SIGINT, which loses the head. The first one
            ends a head of many steps with the step that it is in: it is saved, and the steps left are not charged.
    """
    secrets = secrets or Secrets()
    made, start = session.prepared, time.monotonic()
    stream = feature_stream(made, progress)
    bad = _count_bad(stream.feature_ND)
    if bad == stream.num_records:
        raise DataError(
            f"features: none of {bad} records has finite ones; expected some. Look at the pictures with `dpvision data inspect`."
        )
    features_s = time.monotonic() - start
    about = {"records": stream.num_records, "without_features": bad, "features_s": features_s}
    # A selection goes on to its end when a signal asks to stop: where it ended would tell of its runs, whose number is secret.
    doing = "finishing the selection" if made.model.candidates else "finishing this step"
    with StopRequest(f"{doing}, then saving the head", session.unsaved) as request:
        if made.model.candidates:
            config, selected = choose_head(session.config, stream, session.plan, _charger(session))
            fitted, chosen = Fitted(selected.head), {"candidate": selected.candidate, "score": selected.score}
        else:
            keys = secrets.draw, secrets.noise
            releases = Releases(session.plan, _charger(session), *keys, stop=lambda: request.asked, _next=session.ledger.steps)
            config, fitted, chosen = session.config, fit_head(session.config, stream, releases), None
            # A selection's time would tell how many runs it had, which is secret even from this folder.
            about["head_s"] = time.monotonic() - start - features_s
        # For the operator: how many records took no part is a function of private pictures.
        write_json(session.folder.confidential / "head.json", about)
        return save(session, config, fitted, chosen)


def feature_stream(made: Prepared, progress: Callable[[int], None] | None = None) -> FeatureStream:
    """Features of the records that take part, from the store's cache or computed now, with their labels."""
    cfg, hardware = made.model, made.config.hardware
    assert cfg.encoder.pooling is not None and cfg.num_classes is not None
    # What confidential weights make of public pictures is private, and a public store's folder is not the place for it.
    keep = not made.encoder.confidential or made.store.visibility == "private"
    feature_ND = feature_array(
        made.encoder, cfg.encoder.pooling, cfg.encoder.width, made.store, made.row_N, dataset_size=made.plan.dataset_size, keep=keep,
        batch_size=hardware.physical_batch_size, workers=hardware.workers, device=made.device, progress=progress,
    )  # fmt: skip
    needs_centre = cfg.centre == "textures" and not made.encoder.standard_rows
    centre_D = texture_centre(made.encoder, cfg.encoder.pooling, made.device) if needs_centre else None
    order_D = made.encoder.order_D
    scale_D = None if order_D is None else frequency_scale(order_D, cfg.frequency_decay or 1.0)
    return FeatureStream(feature_ND, made.label, cfg.num_classes, centre_D=centre_D, unit=cfg.unit, scale_D=scale_D)


def save(session: HeadSession, config: RunConfig, fitted: Fitted, chosen: dict[str, Any] | None) -> Path:
    """Write the checkpoint: the head, and in the manifest what it stands on.

    Args:
        config: the session's, or with candidates that of the one that was chosen.
        chosen: what else a private selection releases.
    """
    made, ledger = session.prepared, session.ledger
    manifest = {
        "run_id": session.folder.run_id,
        "ledger_steps": ledger.steps,
        "updates": ledger.steps - session.charged_before,
        "config": to_dict(config),
        "plan": session.plan.to_dict(),
        "ledger_digest": ledger.digest,
        "lineage": [*made.lineage, own_entry(session.plan, made.store, session.folder.run_id, ledger.steps, made.lineage)],
        "encoder": session.about_encoder,
        "versions": code_versions(),
    }
    if chosen is not None:
        manifest["chosen"] = chosen
    if session.plan.guarantee != "dp":
        heads = [fitted.head, *([] if fitted.ema is None else [fitted.ema])]
        remember_weights(made.store, session.folder.run_id, [t for head in heads for t in _tensors(head).values()], ())
    path = save_checkpoint(
        session.folder.checkpoints / f"step-{ledger.steps:08d}",
        manifest,
        _tensors(fitted.head),
        ema=None if fitted.ema is None else _tensors(fitted.ema),
    )
    session.folder.copy_ledger(ledger.path)
    session.finished = True
    return path


def _tensors(head: Head) -> dict[str, Any]:
    centre_D = torch.zeros(head.weight_KD.shape[1]) if head.centre_D is None else head.centre_D
    return {"weight": head.weight_KD, "bias": head.bias_K, "centre": centre_D}


def _charger(session: HeadSession) -> Callable[[], int]:
    """``ledger.append``, with a public line for each release."""
    behind = runs_on(session.prepared.lineage, session.prepared.store.store_id)
    meter, path = EpsilonMeter(session.plan, behind), session.folder.base / "progress.jsonl"

    def charge() -> int:
        step = session.ledger.append()
        with open(path, "a") as file:
            file.write(json.dumps(meter.entry(step + 1), allow_nan=False) + "\n")
        return step

    return charge


def _count_bad(feature_ND: np.ndarray) -> int:
    """Records that a release leaves out for their features."""
    parts = (feature_ND[i : i + _BLOCK] for i in range(0, len(feature_ND), _BLOCK))
    return sum(int((~np.isfinite(part).all(axis=1)).sum()) for part in parts)


def _read_plan(base: Path) -> DPPlan:
    return DPPlan.from_dict(_read_json(base / "plan.json"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("not an object")
        return found
    except (OSError, ValueError) as error:
        raise CheckpointError(f"run: {path} cannot be read ({error}). Restore it as the run wrote it.") from None
