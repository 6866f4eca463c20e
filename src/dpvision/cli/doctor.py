"""``dpvision doctor``: how a model's per-record gradients are computed, without allocating it; with
``--measure``, run on this machine.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from dpvision.cli.output import emit, parse, shown
from dpvision.config import HardwareConfig, OptimConfig
from dpvision.errors import ConfigError, DPVisionError, PrivacyError

if TYPE_CHECKING:
    from dpvision.cli.doctor_look import Look
    from dpvision.cli.doctor_model import Subject

_NAMED = 4
"""Number of names that the text lists before "and N more"; JSON has all."""


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    parse(doctor, "doctor", argv)


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
    from dpvision.cli.doctor_look import look
    from dpvision.cli.doctor_measure import measure as run_measure
    from dpvision.cli.doctor_model import find_subject
    from dpvision.dp.per_record import default_chunk
    from dpvision.dp.route import trained

    subject = find_subject(model, image_size)
    hardware = _hardware(subject, device, precision, physical_batch_size)
    built = subject.make(True)
    params = trained(built.model)
    sizes = {name: parameter.numel() for name, parameter in built.model.named_parameters()}
    seen = look(model, built)
    slow_chunk = default_chunk({name: params[name] for name in seen.slow}) if seen.slow else 0
    result = _result(subject, seen, sizes, sum(p.numel() for p in params.values()))
    text = _text(result, seen, sizes, slow_chunk, measure)
    if not measure:
        emit(result, json, text)
        return
    try:
        if seen.refused:
            raise PrivacyError(seen.refused[0].message)
        result["measured"] = run_measure(
            subject.make(False),
            hardware,
            num_timed=physical_batch_size,
            max_grad_norm=(subject.config.privacy.max_grad_norm if subject.config else None) or 1.0,
            state_bytes=result["state_bytes"],
            max_minutes=max_minutes,
        )
    except DPVisionError as error:
        # Print the results so far, then the error, with exit status 2.
        result["measured"] = {"failed": str(error)}
        emit(result, json, text)
        raise
    emit(result, json, f"{text}\n{_measured_text(result['measured'])}")


def _hardware(
    subject: "Subject", device: str | None, precision: str | None, physical_batch_size: int | None
) -> HardwareConfig:
    given = {"device": device, "precision": precision, "physical_batch_size": physical_batch_size}
    default = subject.config.hardware if subject.config is not None else HardwareConfig()
    return replace(default, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _result(subject: "Subject", seen: "Look", sizes: dict[str, int], total: int) -> dict[str, Any]:
    """Return the JSON output."""
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        if name not in seen.frozen:
            part = name.split(".")[0]
            parts[part] = parts.get(part, 0) + size
    optim = subject.config.optim if subject.config is not None else OptimConfig()
    # Weights, clipped sum, noise (one tensor at a time), the optimizer's moments, the averaged
    # weights: float32 each.
    copies = 3 + (2 if optim.name == "adamw" else 1) + optim.averages
    return {
        "model": subject.name,
        "kind": subject.kind,
        "recipe": subject.name if subject.kind == "recipe" else None,
        "num_parameters": total,
        "parts": parts,
        "state_bytes": 4 * (copies * total + sum(sizes[name] for name in seen.frozen)),
        "per_record_gradient_bytes": 4 * total,
        "ways": {
            way: {"num_tensors": len(names), "num_parameters": sum(sizes[name] for name in names)}
            for way, names in seen.ways.items()
        },
        "slow": seen.slow,
        "unused": seen.ways.get("unused", []),
        "refused": [
            {"message": refusal.message, "layers": refusal.layers} for refusal in seen.refused
        ],
        "frozen": {
            "num_tensors": len(seen.frozen),
            "num_parameters": sum(sizes[name] for name in seen.frozen),
            "names": seen.frozen,
        },
        "tied": seen.tied,
    }


def _text(
    result: dict[str, Any], seen: "Look", sizes: dict[str, int], slow_chunk: int, measured: bool
) -> str:
    total = result["num_parameters"]
    tensors = len(sizes) - len(seen.frozen)
    lines = [
        f"{result['model']} ({result['kind']}): {total:,} trained parameters in {tensors:,} tensors"
    ]
    parts = sorted(result["parts"].items(), key=lambda item: -item[1])
    lines.append(f"  parts    {_few([f'{name} {size:,}' for name, size in parts])}")
    if seen.frozen:
        lines.append(
            f"  frozen   {result['frozen']['num_parameters']:,} in {len(seen.frozen):,} tensors: "
            f"{_few(seen.frozen)}"
        )
    if seen.tied:
        lines.append(
            "  tied     "
            f"{_few([' = '.join([first, *others]) for first, others in seen.tied.items()])}"
        )
    lines.append(
        f"  memory   {_size(result['state_bytes'])} of state in training (weights, clipped sum, "
        "noise, optimizer), and the batch"
    )
    for refusal in seen.refused:
        lines += ["", f"REFUSED  {refusal.message}"]
        if len(refusal.layers) > 1:
            lines.append(
                f"         The same holds for {len(refusal.layers) - 1:,} more: "
                f"{_few(refusal.layers[1:])}"
            )
    if seen.refused:
        return "\n".join(lines)
    lines += [
        "",
        "ways to the per-record gradients (exact, all of them):",
        *_ways_table(result["ways"], total),
    ]
    if seen.slow:
        slow_bytes = 4 * sum(sizes[name] for name in seen.slow)
        lines += [
            "",
            f"slow: per-record gradients by vmap, {_size(slow_bytes)} each, up to {slow_chunk:,} "
            "records at once. To avoid this, freeze",
        ]
        lines.append(
            "these (requires_grad_(False)) or write the layer with operations that have a rule "
            "(docs/clipping.md):"
        )
        shown_slow = [
            f"  {name}  {reason}" for name, reason in list(seen.slow.items())[: 3 * _NAMED]
        ]
        lines += shown_slow + (
            [f"  and {len(seen.slow) - len(shown_slow):,} more"]
            if len(seen.slow) > len(shown_slow)
            else []
        )
    if result["unused"]:
        lines += [
            "",
            f"unused: the loss does not depend on {_few(result['unused'])}. They get only noise: "
            "freeze them.",
        ]
    if result["kind"] == "timm":
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
    lines = ["", f"measured on {measured['device']}, {measured['precision']}:"]
    lines.append(
        f"  exact    sum of {oracle['records']} records within {oracle['difference']:.1e} of the "
        f"oracle's, norms within {oracle['norm_difference']:.1e} ({oracle['tolerance']:.0e} "
        f"allowed); float64 gates: {oracle['float64']}"
    )
    if largest is not None:
        told = f"  fits     {largest['records']:,} records in one physical batch ({largest['how']}"
        if "record_bytes" in largest:
            told += (
                f": {_size(largest['record_bytes'])} each, {largest['margin']:.0%} of "
                f"{_size(largest['available_bytes'])} free"
            )
        lines.append(told + ")")
    price, private, plain = step["price"], step["private_s"], step["non_private_s"]
    lines.append(
        f"  step     {step['physical_batch_size']:,} records in {private['median']:.3g} s "
        f"[{private['low']:.3g} to {private['high']:.3g}], {shown(step['records_per_s'])} "
        f"records/s; non-private {plain['median']:.3g} s [{plain['low']:.3g} to "
        f"{plain['high']:.3g}]"
    )
    lines.append(
        f"  overhead {price['median']:.2f} times a non-private step [{price['low']:.2f} to "
        f"{price['high']:.2f}], {step['rounds']} rounds"
    )
    return "\n".join(lines)


def _few(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _share(part: float) -> str:
    return f"{part:.1%}" if part >= 0.001 else "< 0.1%"


def _size(num_bytes: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return (
                f"{num_bytes / factor:.3g} {unit}"
                if num_bytes < 1000 * factor
                else f"{num_bytes / factor:,.0f} {unit}"
            )
    return f"{num_bytes:.0f} bytes"
