"""``dpvision doctor``: how a model's per-record gradients are computed, without allocating it; with
``--measure``, run on this machine.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from dpvision.cli.output import emit, parse, shown
from dpvision.cli.run_args import announce
from dpvision.config import HardwareConfig
from dpvision.errors import ConfigError, DPVisionError
from dpvision.privacy.printed import size

if TYPE_CHECKING:
    from dpvision.doctor import Findings

_NAMED = 4
"""Number of names that the text lists before "and N more"; JSON has all."""


def doctor(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    measure: bool = False,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    precision: Literal["float32", "bfloat16"] | None = None,
    physical_batch_size: int | None = None,
    max_minutes: float = 5.0,
    image_size: int | None = None,
    json: bool = False,
) -> None:
    """Check whether a model can be trained privately, how its per-record gradients are computed,
    and at what cost.

    Without --measure the model is never allocated: only shapes are needed, so any model takes about
    a second. With --measure, three records are compared with the oracle (exit 2 if they differ),
    the largest physical batch is found, and a private step is timed against a non-private one.

      dpvision doctor vip.base                          a recipe
      dpvision doctor vit_base_patch16_224              a timm name, as a classifier
      dpvision doctor mymodel:make                      a function in ./mymodel.py that returns a
                                                        torch.nn.Module
      dpvision doctor vip.micro --measure --max-minutes 1

    Args:
        model: Recipe, timm name, or module:function. The function returns an image classifier, or
            (model, loss_fn, batch).
        measure: Also run the model on this machine.
        device: For --measure; if omitted, the recipe's, or a GPU if there is one.
        precision: Precision of the forward pass for --measure; if omitted, the recipe's, or
            float32.
        physical_batch_size: Time a batch of this size instead of searching for the largest.
        max_minutes: Approximate time limit for --measure; batches shrink to meet it.
        image_size: Image size in pixels, for a model that does not define it; if omitted, timm's,
            or 224.
        json: Print JSON.
    """
    if not 0 < max_minutes < float("inf"):
        raise ConfigError(
            f"doctor: --max-minutes={max_minutes}; expected a positive number. Use 5."
        )
    from dpvision.doctor import find_subject, look
    from dpvision.doctor import measure as run_measure

    subject = find_subject(model, image_size)
    given = {"device": device, "precision": precision, "physical_batch_size": physical_batch_size}
    hardware = replace(
        subject.config.hardware if subject.config is not None else HardwareConfig(),
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )
    found = look(subject)
    result, text = found.to_dict(), _text(found, measure)
    if measure:
        try:
            result["measured"] = run_measure(
                found,
                hardware,
                num_timed=physical_batch_size,
                max_minutes=max_minutes,
                say=announce,
            )
            text += f"\n{_measured_text(result['measured'])}"
        except DPVisionError as error:
            # Print the results so far, then the error, with exit status 2.
            emit(result | {"measured": {"failed": str(error)}}, json, text)
            raise
    emit(result, json, text)


def _text(found: "Findings", measured: bool) -> str:
    result, total = found.to_dict(), found.num_parameters(found.trained)
    parts = sorted(result["parts"].items(), key=lambda item: -item[1])
    lines = [
        f"{found.subject.name} ({found.subject.kind}): {total:,} trained parameters in "
        f"{len(found.trained):,} tensors",
        f"  parts    {_few([f'{name} {size:,}' for name, size in parts])}",
    ]
    if found.frozen:
        lines.append(
            f"  frozen   {found.num_parameters(found.frozen):,} in {len(found.frozen):,} tensors: "
            f"{_few(found.frozen)}"
        )
    if found.tied:
        tied = [" = ".join([first, *others]) for first, others in found.tied.items()]
        lines.append(f"  tied     {_few(tied)}")
    lines.append(
        f"  memory   {size(found.state_bytes)} of state in training (weights, clipped sum, "
        "noise, optimizer), and the batch"
    )
    for refusal in found.refused:
        lines += ["", f"REFUSED  {refusal.message}"]
        if len(refusal.layers) > 1:
            lines.append(
                f"         The same holds for {len(refusal.layers) - 1:,} more: "
                f"{_few(refusal.layers[1:])}"
            )
    if found.refused:
        return "\n".join(lines)
    lines += ["", "ways to the per-record gradients (exact, all of them):"]
    lines += _ways_table(result["ways"], total)
    if found.slow:
        lines += [
            "",
            f"slow: per-record gradients by vmap, {size(4 * found.num_parameters(found.slow))} "
            f"each, up to {found.slow_chunk:,} records at once. To avoid this, freeze",
            "these (requires_grad_(False)) or write the layer with operations that have a rule "
            "(docs/clipping.md):",
        ]
        reasons = [f"  {name}  {reason}" for name, reason in found.slow.items()]
        lines += reasons[: 3 * _NAMED]
        if len(reasons) > 3 * _NAMED:
            lines.append(f"  and {len(reasons) - 3 * _NAMED:,} more")
    if result["unused"]:
        lines += [
            "",
            f"unused: the loss does not depend on {_few(result['unused'])}. They get only noise: "
            "freeze them.",
        ]
    if found.subject.kind == "timm":
        lines += ["", "Checked as a classifier with cross-entropy, at timm's image size for it."]
    if not measured:
        lines += [
            "",
            "Next: --measure compares with the oracle, checks separability, and finds the "
            "largest batch and the overhead.",
        ]
    return "\n".join(lines)


def _ways_table(ways: dict[str, dict[str, int]], total: int) -> list[str]:
    rows = [("method", "tensors", "parameters", "share")]
    for way, counts in sorted(ways.items(), key=lambda item: -item[1]["num_parameters"]):
        rows.append(
            (
                way,
                f"{counts['num_tensors']:,}",
                f"{counts['num_parameters']:,}",
                _share(counts["num_parameters"] / total),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        f"  {row[0]:{widths[0]}}  " + "  ".join(f"{row[i]:>{widths[i]}}" for i in (1, 2, 3))
        for row in rows
    ]


def _measured_text(measured: dict[str, Any]) -> str:
    oracle, largest, step = measured["oracle"], measured["largest_physical_batch"], measured["step"]
    lines = [
        "",
        f"measured on {measured['device']}, {measured['precision']}:",
        f"  exact    sum of {oracle['records']} records within {oracle['difference']:.1e} of the "
        f"oracle's, norms within {oracle['norm_difference']:.1e} ({oracle['tolerance']:.0e} "
        f"allowed); float64 gates: {oracle['float64']}",
    ]
    if largest is not None:
        told = f"  fits     {largest['records']:,} records in one physical batch ({largest['how']}"
        if "record_bytes" in largest:
            told += (
                f": {size(largest['record_bytes'])} each, {largest['margin']:.0%} of "
                f"{size(largest['available_bytes'])} free"
            )
        lines.append(told + ")")
    price, private, plain = step["price"], step["private_s"], step["non_private_s"]
    lines += [
        f"  step     {step['physical_batch_size']:,} records in {private['median']:.3g} s "
        f"[{private['low']:.3g} to {private['high']:.3g}], {shown(step['records_per_s'])} "
        f"records/s; non-private {plain['median']:.3g} s [{plain['low']:.3g} to "
        f"{plain['high']:.3g}]",
        f"  overhead {price['median']:.2f} times a non-private step [{price['low']:.2f} to "
        f"{price['high']:.2f}], {step['rounds']} rounds",
    ]
    return "\n".join(lines)


def _few(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _share(part: float) -> str:
    return f"{part:.1%}" if part >= 0.001 else "< 0.1%"


run = partial(parse, doctor, "doctor")
