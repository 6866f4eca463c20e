"""What ``dpvision adapt`` prints before anything is spent: the plan and the head."""

from typing import TYPE_CHECKING

from dpvision.cli.train import plan_text
from dpvision.privacy.printed import duration, size

if TYPE_CHECKING:
    from dpvision.adapt.prepare import Prepared


def head_text(made: "Prepared") -> str:
    """Return the plan and the head as text, to print before anything is spent."""
    import numpy as np

    from dpvision.adapt.fit import kind_of
    from dpvision.adapt.public_statistics import rows_used
    from dpvision.devices import has_bfloat16

    cfg, choice = made.model, made.model.choice
    if choice.candidates:
        head, more = f"the best of {', '.join(choice.candidates)} by a private score,", []
    else:
        head, more = cfg.head, kind_of(made.config).plan_lines(made.config, made.plan)
    chosen = f" (chosen)\n  {cfg.head}: {choice.reason}" if choice.reason else ""
    low = ", in bfloat16" if cfg.encoder.precision == "bfloat16" else ""
    if low and made.device.type == "cpu" and not has_bfloat16(made.device):
        low += ", which this CPU only emulates, many times slower than float32"
    lines = [
        f"encoder              {made.encoder.name}, {cfg.encoder.pooling}: "
        f"{cfg.encoder.width:,} dimensions per image, frozen{low}",
        f"features             {_features_cost(made)}",
        f"head                 {head} for {cfg.num_classes:,} classes{chosen}",
        *more,
    ]
    if made.store.results_visibility == "public":
        # Unlabelled records have -1, or NOT_KNOWN for every class.
        one, several = made.label[made.label >= 0], made.label == 1
        counts = (
            several.sum(axis=0)
            if made.label.ndim == 2
            else np.bincount(one, minlength=cfg.num_classes or 0)
        )
        if (empty := np.flatnonzero(counts == 0)).size:
            shown = ", ".join(map(str, empty[:5].tolist())) + (", ..." if empty.size > 5 else "")
            lines.append(
                f"note                 {empty.size} declared classes have no image in this "
                f"public store: {shown}"
            )
    if made.public is not None:
        lines.append(
            f"public store         {made.public.path}: {len(rows_used(made.public)):,} of "
            f"{made.public.num_records:,} images standardise the features; all are compared with "
            "the private ones first"
        )
    text = plan_text(made.config, made.plan, made.store, made.lineage)
    return "\n  ".join([text, *lines])


def _features_cost(made: "Prepared") -> str:
    """Return the disk space and time for the features of the declared number of records (of people,
    as many as may take part), as text.
    """
    from dpvision.encoders.feature_file import feature_dtype, seconds_per_image

    plan, width = made.plan, made.model.encoder.width
    dtype = feature_dtype(made.encoder, plan.dataset_size, width)
    count = (
        plan.dataset_size
        if made.people is None
        else min(plan.dataset_size, plan.unit.max_records * plan.unit.sampled_from)
    )
    seconds = seconds_per_image(made.extractor, made.device) * count
    return (
        f"{size(dtype.itemsize * count * width)} as {dtype} in the store's folder; about "
        f"{duration(max(seconds, 1))} on this machine at {made.encoder.image_size} px without "
        "decoding, unless they are cached"
    )
