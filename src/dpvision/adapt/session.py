"""The run of a private head: folder, ledger, features, releases charged one by one, checkpoint.

    with new_head_session(config, root) as session:
        adapt(session)

The ledger is correct whenever the process is killed: charged releases stay charged. A resumed run
(``resumed_head_session``) has new keys and the releases left. A head of many steps is saved on the
way, after steps, and goes on from there; another head starts again with the releases left, or is
refused if these are too few.

Legend: N records, D feature dimension.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpvision.adapt.defaults import frequency_scale
from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.fit import KINDS, fit_head
from dpvision.adapt.heads.kind import Fitted, Progress
from dpvision.adapt.person_rows import PersonFeatures
from dpvision.adapt.prepare import Prepared, prepare
from dpvision.adapt.public_statistics import Say, public_statistics, require_apart
from dpvision.adapt.release import Releases
from dpvision.adapt.select import choose_head
from dpvision.checkpoint import Checkpoint
from dpvision.config import RunConfig
from dpvision.devices import loader_threads
from dpvision.encoders.feature_file import feature_array, kept_centre, rows_of_pass
from dpvision.encoders.identity import check_same, describe
from dpvision.errors import DataError, PrivacyError
from dpvision.files import append_lines, write_json
from dpvision.privacy.plan import DPPlan
from dpvision.runs.run import EpsilonMeter, Run, Secrets, Stopped, StopRequest, new_run, read_object

ENCODER_FILE = "encoder.json"
"""Description of the encoder at the start of the run; public."""
_SAVE_EVERY_S = 10.0
"""Upper bound on ``hardware.checkpoint_every_s``, which is meant for networks: a head's checkpoint
is small.
"""
_BLOCK = 1 << 16


@dataclass
class HeadSession:
    """The state of one start of a head's run."""

    prepared: Prepared
    run: Run
    about_encoder: dict[str, Any]
    finished: bool = False
    """Whether the run has its head, and nothing is left to do."""
    progress: Progress | None = None
    """Steps of an earlier start that this one goes on from."""
    updates: int = 0
    """Number of releases that are in the newest checkpoint."""
    charged_before: int = field(init=False)
    """Number of steps charged by earlier starts."""
    lost: int = field(init=False)
    """Number of those that are in no checkpoint."""

    def __post_init__(self) -> None:
        self.charged_before = self.run.ledger.steps
        self.lost = self.charged_before - self.updates

    def unsaved(self) -> int:
        """Return the number of releases charged by this start that are in no checkpoint yet."""
        return self.run.ledger.steps - self.lost - self.updates

    @property
    def config(self) -> RunConfig:
        return self.prepared.config

    @property
    def plan(self) -> DPPlan:
        return self.prepared.plan


@contextlib.contextmanager
def new_head_session(
    config: RunConfig | Prepared,
    root: Path,
    *,
    total_epsilon: float | None = None,
    say: Say = lambda text: None,
) -> Iterator[HeadSession]:
    """Open a session for a new run in folder ``root``.

    Args:
        total_epsilon: largest epsilon that all runs on the store may have with this one.
        say: shows how far the comparison of public with private images is.

    Raises:
        DPVisionError: the run is impossible or unsafe. Nothing has been charged.
    """
    made = config if isinstance(config, Prepared) else prepare(config)
    compare_images(made, say)
    encoder = describe(
        made.encoder, made.model.encoder.pooling or "", made.model.encoder.width, made.device
    )
    with new_run(
        root,
        made.config,
        made.plan,
        made.store,
        made.lineage,
        num_bytes=_num_bytes(made),
        secluded=made.encoder.confidential,
        files={ENCODER_FILE: encoder},
        total=total_epsilon,
    ) as run:
        yield HeadSession(made, run, encoder)


@contextlib.contextmanager
def resumed_head_session(
    root: Path, hardware: dict[str, Any] | None = None, *, say: Say = lambda text: None
) -> Iterator[HeadSession]:
    """Open a session for an existing run, with its config, plan, encoder and ledger, and new keys.

    Args:
        hardware: HardwareConfig fields to change, the only settings that a resumed run may change.
        say: as for ``new_head_session``.

    Raises:
        PrivacyError: too few releases are left for the head.
        DPVisionError: the run, its ledger, its encoder and its store do not match.
    """
    stopped = Stopped.read(root, hardware)
    made = prepare(stopped.config, stopped.plan)
    stopped.require_store(made.store)
    compare_images(made, say)
    encoder = read_object(stopped.base / ENCODER_FILE)
    check_same(made.encoder, encoder, str(root), made.device)
    updates, progress = _read_progress(stopped.checkpoint)
    with stopped.resumed(made.store, made.lineage, num_bytes=_num_bytes(made)) as run:
        charged = run.ledger.steps
        finished = stopped.checkpoint is not None and (
            progress is None or charged == made.plan.steps
        )
        kind = KINDS.get(made.model.head)  # None for candidates, each of which has its own
        needed = 1 if kind is None else kind.fewest_releases
        if not finished and progress is None and made.plan.steps - charged < needed:
            raise PrivacyError(
                f"adapt: {charged} of {made.plan.steps} releases of {root} were charged and lost "
                f"before the head was saved; expected {needed} left for "
                f"{made.model.head}. Their epsilon stays spent. Start a new run under another "
                "--name; its epsilon adds to it (`dpvision ledger STORE` prints the total)."
            )
        yield HeadSession(made, run, encoder, finished, progress, updates)


def adapt(
    session: HeadSession,
    *,
    secrets: Secrets | None = None,
    progress: Callable[[int], None] | None = None,
    public_progress: Callable[[int], None] | None = None,
    on_step: Callable[[int], None] = lambda steps: None,
) -> Path:
    """Compute features, make the releases, train the head and save it.

    Args:
        secrets: two keys, new for this start; tests inject them.
        progress: called with the number of records whose features are computed.
        public_progress: the same of the public store's images, which come first.
        on_step: called with the number of charged steps, after each step of a head of many steps.

    Returns:
        The checkpoint's folder.

    Raises:
        DataError: no record has finite features, or the disk is too full for them. Nothing has been
            charged.
        CheckpointError: the checkpoint cannot be written.
        KeyboardInterrupt: SIGINT while features are computed, or a second SIGINT after the first
            release, which loses the steps since the last checkpoint. The first one ends a head of
            many steps after the step in progress: the head is saved, and the steps left are not
            charged until the run is resumed.
    """
    secrets = secrets or Secrets()
    made, start = session.prepared, time.monotonic()
    stream = feature_stream(made, progress, public_progress)
    image_ND = (
        stream.feature_ND.image_MD
        if isinstance(stream.feature_ND, PersonFeatures)
        else stream.feature_ND
    )
    bad = _count_bad(image_ND)
    if bad == len(image_ND):
        raise DataError(
            f"features: non-finite for all {bad} records; expected finite ones. Look at them: "
            "dpvision data inspect STORE."
        )
    features_s = time.monotonic() - start
    about = {"records": len(image_ND), "without_features": bad, "features_s": features_s}
    # A signal does not stop a selection early: the point where it stopped would reveal the number
    # of runs, which is secret.
    doing = "finishing the selection" if made.model.choice.candidates else "finishing this step"
    with StopRequest(f"{doing}, then saving the head", session.unsaved) as request:
        session.run.folder.clear_stopped()
        if made.model.choice.candidates:
            charge, bounded = _charger(session.run), not made.encoder.standard_rows
            config, selected = choose_head(
                session.config, stream, session.plan, charge, bounded=bounded
            )
            fitted, chosen = (
                Fitted(selected.head),
                {"candidate": selected.candidate, "score": selected.score},
            )
        else:
            keys = secrets.draw, secrets.noise
            releases = Releases(
                session.plan,
                _charger(session.run),
                *keys,
                stop=lambda: request.asked,
                _next=session.run.ledger.steps,
            )
            after_step = _saver(session, on_step)
            config, chosen = session.config, None
            fitted = fit_head(
                config, stream, releases, start=session.progress, after_step=after_step
            )
            # Not for a selection: its time would reveal the number of runs, which is secret even
            # from this folder.
            about["head_s"] = time.monotonic() - start - features_s
        # Confidential: the number of records left out is a function of private images.
        write_json(session.run.folder.confidential / "head.json", about)
        path = save(session, config, fitted, chosen)
        if request.asked and not session.finished:
            session.run.folder.mark_stopped()
        return path


def compare_images(made: Prepared, say: Say = lambda text: None) -> None:
    """Refuse public images that are among the private ones (``require_apart``)."""
    if made.public is not None:
        workers = loader_threads(made.config.hardware.workers, made.device)
        require_apart(made.public, made.store, workers=workers, say=say)


def feature_stream(
    made: Prepared,
    progress: Callable[[int], None] | None = None,
    public_progress: Callable[[int], None] | None = None,
) -> FeatureStream:
    """Return the features, cached or computed now, and labels of the records (where people are
    drawn, of the people) that take part.
    """
    cfg, hardware = made.model, made.config.hardware
    features, encoder, pooling = cfg.features, made.extractor, cfg.encoder.pooling
    assert pooling is not None and cfg.num_classes is not None
    # Features of public images by confidential weights are private and must not be kept in a public
    # store's folder.
    keep = made.store.visibility == "private" or not encoder.confidential
    centre_D, spread_D, order_D = None, None, encoder.order_D
    if made.public is not None:
        centre_D, spread_D = public_statistics(
            encoder,
            pooling,
            cfg.encoder.width,
            made.public,
            batch_size=hardware.physical_batch_size,
            workers=hardware.workers,
            device=made.device,
            progress=public_progress,
        )
    elif features.centre == "textures":
        centre_D = kept_centre(encoder, pooling, made.store, keep=keep, device=made.device)
    feature_ND = feature_array(
        encoder,
        pooling,
        cfg.encoder.width,
        made.store,
        made.row_N,
        dataset_size=made.plan.dataset_size,
        keep=keep,
        batch_size=rows_of_pass(encoder, hardware.physical_batch_size, made.device),
        workers=loader_threads(hardware.workers, made.device),
        device=made.device,
        progress=progress,
    )
    decay = features.frequency_decay or 1.0
    return FeatureStream(
        feature_ND if made.people is None else PersonFeatures(feature_ND, made.people),
        made.label,
        cfg.num_classes,
        centre_D=centre_D,
        spread_D=spread_D,
        unit=features.unit,
        scale_D=None if order_D is None else frequency_scale(order_D, decay),
    )


def save(
    session: HeadSession,
    config: RunConfig,
    fitted: Fitted,
    chosen: dict[str, Any] | None,
    *,
    timed: bool = False,
) -> Path:
    """Write the checkpoint: the head, what more steps start from if there are any left, and a
    manifest that describes its encoder.

    Args:
        config: the session's, or the chosen candidate's after a selection.
        chosen: the candidate and score that a private selection releases.
        timed: as for ``Run.save``.
    """
    more: dict[str, Any] = {
        "encoder": session.about_encoder,
        **({} if chosen is None else {"chosen": chosen}),
    }
    steps, progress = session.run.ledger.steps, fitted.progress
    updates = steps - session.charged_before if progress is None else progress.releases
    session.finished = progress is None or steps == session.plan.steps
    path = session.run.save(
        _tensors(fitted.head),
        updates=updates,
        ema=None if fitted.ema is None else _tensors(fitted.ema),
        optimizer=None if progress is None or session.finished else progress.tensors(),
        config=config,
        timed=timed,
        **more,
    )
    session.updates = updates
    return path


def _saver(
    session: HeadSession, on_step: Callable[[int], None]
) -> Callable[[Callable[[], Fitted]], None]:
    """Return a function that saves the head every few seconds, so that a crash loses little."""
    every = min(session.config.hardware.checkpoint_every_s, _SAVE_EVERY_S)
    saved = time.monotonic()

    def after_step(fitted: Callable[[], Fitted]) -> None:
        nonlocal saved
        on_step(session.run.ledger.steps)
        if session.run.ledger.steps < session.plan.steps and time.monotonic() - saved >= every:
            save(session, session.config, fitted(), None, timed=True)
            saved = time.monotonic()

    return after_step


def _read_progress(checkpoint: Checkpoint | None) -> tuple[int, Progress | None]:
    """Return the number of releases in a checkpoint, and what more steps start from; None if it is
    complete.
    """
    if checkpoint is None:
        return 0, None
    updates = checkpoint.manifest["updates"]
    return updates, None if checkpoint.optimizer is None else Progress.of(
        updates, checkpoint.optimizer
    )


def _num_bytes(made: Prepared) -> int:
    """Return the size of two checkpoints."""
    kind = KINDS.get(made.model.head)
    width = made.model.encoder.width + 1 if kind is not None and kind.saves_map else 0
    return 8 * (made.model.num_parameters + width**2)


def _tensors(head: Head) -> dict[str, Any]:
    centre_D = torch.zeros(head.weight_KD.shape[1]) if head.centre_D is None else head.centre_D
    spread = {} if head.spread_D is None else {"spread": head.spread_D}
    return {"weight": head.weight_KD, "bias": head.bias_K, "centre": centre_D, **spread}


def _charger(run: Run) -> Callable[[], int]:
    """Return ``ledger.append``, extended to log a public line for each release."""
    meter, path = EpsilonMeter(run.plan, run.behind), run.folder.base / "progress.jsonl"

    def charge() -> int:
        step = run.ledger.append()
        with append_lines(path) as file:
            file.write(json.dumps(meter.entry(step + 1), allow_nan=False) + "\n")
        return step

    return charge


def _count_bad(feature_ND: np.ndarray) -> int:
    """Return the number of records with non-finite features, which releases leave out."""
    parts = (feature_ND[i : i + _BLOCK] for i in range(0, len(feature_ND), _BLOCK))
    return sum(int((~np.isfinite(part).all(axis=1)).sum()) for part in parts)
