"""``dpvision doctor``: what a recipe's model is made of, without allocating it."""

from collections.abc import Sequence

from dpvision.cli.output import RecipeName, emit, pairs, parse
from dpvision.cli.recipe import get_recipe
from dpvision.models import count_parameters, make_model_on_meta


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    parse(doctor, "doctor", argv)


def doctor(recipe: RecipeName, json: bool = False) -> None:
    """A recipe's model: trained parameters by part, and the memory that training takes per process.

    Args:
        recipe: Name of a recipe.
        json: Print JSON.
    """
    config = get_recipe(recipe)
    model = make_model_on_meta(config.model)
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            part = name.split(".")[0]
            parts[part] = parts.get(part, 0) + parameter.numel()
    total = count_parameters(config.model)
    # Weights, clipped sum, noise in turn, two moments of AdamW: float32 each.
    state_bytes = total * 4 * 5 + (total * 4 if config.optim.ema_decay is not None else 0)
    result = {
        "recipe": recipe,
        "num_parameters": total,
        "parts": parts,
        "state_bytes": state_bytes,
        "per_record_gradient_bytes": total * 4,
        "clipping": "per-sample gradients in chunks (vmap), exact for every layer of this model",
    }
    text = [f"{recipe}: {total:,} trained parameters", pairs(parts)]
    text.append(f"memory per process: {state_bytes / 2**20:,.0f} MiB of state, and {total * 4 / 2**20:,.1f} MiB per record of a chunk")
    text.append(f"clipping: {result['clipping']}")
    emit(result, json, "\n".join(text))
