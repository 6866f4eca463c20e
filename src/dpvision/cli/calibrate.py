"""``dpvision calibrate``: fit the temperature and the thresholds of a classifier."""

from dataclasses import asdict
from functools import partial
from typing import Annotated

from dpvision.cli.output import FLAT, Reading, RunPath, StorePath, emit, may_show, parse
from dpvision.cli.paths import check_run, check_store
from dpvision.cli.progress import ProgressLine
from dpvision.errors import OPERATOR_ONLY

_READING = Reading()


def calibrate(
    run: RunPath,
    store: StorePath,
    recall: float | None = None,
    encoder: str | None = None,
    ema: bool = False,
    reading: Annotated[Reading, FLAT] = _READING,
    json: bool = False,
) -> None:
    """Fit a classifier's temperature, and for a multi-label run its thresholds, on public images.

    They go to calibration.json in the run's folder, and `predict`, `load_classifier` and exports
    use them from then on. A private store is refused: no plan covers a function of its labels. The
    images must not be those that the run was trained on.

      dpvision calibrate runs/first stores/public-test
      dpvision calibrate runs/xray stores/public-xray --recall 0.95

    Args:
        run: Run folder of a classifier, or one of its checkpoints.
        store: Labelled store imported with --public.
        recall: For a multi-label run: the share of a class's images that its threshold must find;
            if omitted, the thresholds of largest F1.
        encoder: The head's encoder, as for `dpvision adapt --encoder`, if it has moved since the
            run.
        ema: Calibrate the averaged weights.
        reading: How images are read.
        json: Print JSON.
    """
    reading.check("calibrate")
    check_run(run)
    check_store(store)
    import torch

    from dpvision.data.open import open_store
    from dpvision.eval.probes.calibrate import calibrate as fit

    opened = open_store(store)
    with ProgressLine("scores") as line:
        made = fit(
            run,
            opened,
            recall=recall,
            encoder=encoder,
            ema=ema,
            batch_size=reading.batch_size,
            workers=reading.workers,
            device="cuda" if torch.cuda.is_available() else "cpu",
            progress=lambda n: line.count("scores", n, opened.num_records),
        )
    fitted, path = made.calibration, made.path
    private = made.visibility == "private"
    if not may_show(private, False):
        emit({"out": str(path)}, json, f"calibration in {path}, whose figures are confidential")
        return
    images = f"{fitted.store['images']:,} public images of {fitted.store['name']}"
    text = (
        f"calibration in {path}, from {images}\n"
        f"  temperature {fitted.temperature:.4g}, offset {fitted.offset:.4g}\n"
        f"  mean negative log likelihood {fitted.loss_before:.4g} before, "
        f"{fitted.loss_after:.4g} after"
    )
    if fitted.thresholds is not None:
        low, high = min(fitted.thresholds), max(fitted.thresholds)
        text += f"\n  thresholds of {fitted.rule}: {low:.3g} to {high:.3g}"
    emit({"out": str(path), **asdict(fitted)}, json, (OPERATOR_ONLY if private else "") + text)


run = partial(parse, calibrate, "calibrate")
