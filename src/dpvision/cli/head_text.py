"""The plan of a private head as text."""

from typing import TYPE_CHECKING

from dpvision.cli.train import plan_text

if TYPE_CHECKING:
    from dpvision.adapt.prepare import Prepared


def head_text(made: "Prepared") -> str:
    """Return the plan and the head as text, to print before anything is spent."""
    import numpy as np

    from dpvision.adapt.rate import final_noise

    cfg = made.model
    why = f"\n  {cfg.head}: {cfg.reason}" if cfg.reason else ""
    text = plan_text(made.config, made.plan, made.store, made.lineage)
    text += (
        "\n"
        f"  encoder              {made.encoder.name}, {cfg.encoder.pooling}: "
        f"{cfg.encoder.width:,} dimensions per image, frozen"
    )
    text += f"\n  features             {_features_cost(made)}"
    head = f"{cfg.head} for {cfg.num_classes:,} classes{' (chosen)' if cfg.reason else ''}{why}"
    if cfg.candidates:
        head = (
            f"the best of {', '.join(cfg.candidates)} by a private score, for "
            f"{cfg.num_classes:,} classes"
        )
    text += f"\n  head                 {head}"
    if cfg.head == "many_steps" and not cfg.candidates and made.config.optim.name == "sgd":
        optim = made.config.optim
        noise = final_noise(made.plan, optim)
        text += (
            "\n"
            f"  steps                {made.plan.steps} at learning rate {optim.rate:.4g}, "
            f"momentum {optim.momentum:g}"
        )
        text += f": noise of {noise:.2g} in each weight at the end" if noise else ""
        if (decay := cfg.frequency_decay or 1.0) > 1:
            text += (
                "\n"
                f"  frequencies          energy of each higher one divided by {decay:.3g}, to "
                "favour low ones against noise"
            )
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
            text += (
                "\n"
                f"  note                 {empty.size} declared classes have no image in this "
                f"public store: {shown}"
            )
    return text


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
    size = dtype.itemsize * count * width
    amount = f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
    minutes = seconds_per_image(made.encoder, made.device) * count / 60
    time = (
        f"about {minutes:.0f} minutes"
        if minutes >= 1.5
        else f"about {max(60 * minutes, 1):.0f} seconds"
    )
    return (
        f"{amount} as {dtype} in the store's folder; {time} on this machine without decoding, "
        "unless they are cached"
    )
