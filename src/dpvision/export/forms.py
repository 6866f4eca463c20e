"""Forms that registries and auditors read: a run's statement, and what its operator declares.

- ``opendp``: an entry of the OpenDP deployments registry, tier 3.
- ``cyclonedx``: a bill of materials of a machine-learning model, CycloneDX 1.7 (ECMA-424).

Every figure and sentence on privacy is the statement's own.
"""

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from dpvision.config.unit import Stated
from dpvision.errors import ConfigError
from dpvision.export.card import PIPELINES
from dpvision.export.product import require_new, stated
from dpvision.files import disk_refusals, new_folder
from dpvision.privacy.printed import up
from dpvision.statement.declarations import Declared

Form = Literal["opendp", "cyclonedx"]
_KINDS = {"head": "classifier", "classifier": "classifier", "captioner": "captioner"}


def write_form(run: str | Path, to: Form, folder: str | Path, declared: Declared) -> Path:
    """Write a form into a new folder, with the statement that it is made of; return its path.

    Raises:
        ConfigError: the folder is not empty, or "opendp" of a run without a guarantee.
        PrivacyError: the run cannot be stated (``make_statement``).
        CheckpointError: there is no run or checkpoint, it was altered, or the disk refuses.
    """
    folder = Path(folder)
    require_new(folder)
    statement = stated(Path(run))
    name, make = _MADE[to]
    made = make(statement, declared)
    remedy = "Free some, or choose another folder."
    with disk_refusals("export", folder, remedy), new_folder(folder) as partial:
        for file, value in ((name, made), ("statement.json", statement)):
            (partial / file).write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
    return folder / name


def opendp_entry(statement: dict[str, Any], declared: Declared) -> dict[str, Any]:
    """Return an entry of the OpenDP deployments registry, whose schema it fits at tier 3.

    Raises:
        ConfigError: the run has no guarantee.
    """
    guarantee, mechanism, scope = (
        statement["guarantee"],
        statement["mechanism"],
        statement["scope"],
    )
    if guarantee is None:
        raise ConfigError(
            "export: --to opendp of a run without a guarantee; expected a private run, which the "
            "registry is for. Use --to cyclonedx."
        )
    said = Stated.of(
        scope["unit"]["sampling_unit"], guarantee["epsilon"], guarantee["unit_epsilon"]
    )
    history, executed = statement["history"], mechanism["steps_executed"]
    return {
        "url_slug": f"dpvision-{statement['run_id']}",
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": {
                "name": declared.name,
                "data_curators": declared.curators,
                "description": statement["headline"],
                "intended_use": declared.intended_use,
                "data_product_type": "Machine learning model",
                "data_product_region": declared.region,
                "publication_date": declared.publication_date,
                "data_product_sector": declared.sector,
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": scope["adjacency"],
                "unprotected_quantities": _lines(
                    *scope["not_covered"], scope["dataset_size"]["text"]
                ),
            },
            "privacy_loss": {
                "privacy_unit": said.whom,
                "privacy_unit_details": _lines(scope["unit"]["text"], scope["adjacency"]),
                "privacy_parameters": {
                    "epsilon": float(up(said.epsilon, 4)),
                    "delta": guarantee["delta"],
                },
                "privacy_parameters_details": _lines(
                    *statement["in_words"], f"delta: {guarantee['delta_rule']}"
                ),
            },
            "deployment_model": {
                "model_name": "Central",
                "model_name_details": scope["trust_model"],
                "actors": scope["trust_model"],
                "release_type": "One release",
                "release_type_details": history["other_runs"]["text"],
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "accounting": {
                "post_processing": scope["released"],
                "composition": _lines(
                    guarantee["composition"]["text"], guarantee["accountant"]["method"]
                ),
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": _lines(
                    history["tuning"]["text"], *history["preprocessing"]
                ),
                "mechanisms": _lines(
                    f"Gaussian mechanism, noise multiplier {mechanism['noise_multiplier']:.6g}, "
                    f"clip norm {mechanism['max_grad_norm']:g}, {executed:,} steps.",
                    *(mechanism[name] for name in _MECHANISM),
                    *statement["side_channels"],
                    f"dpvision {statement['versions']['dpvision']}, code "
                    f"{statement['hashes']['code']}.",
                ),
                "justification": declared.justification,
            },
            "administrative": {"registry_authors": declared.curators},
        },
    }


_MECHANISM = (
    "sampling_assumed",
    "sampling_executed",
    "clipping",
    "sensitivity",
    "noise_generator",
    "bad_records",
)


def cyclonedx_bom(statement: dict[str, Any], declared: Declared) -> dict[str, Any]:
    """Return a bill of materials of the model in CycloneDX 1.7's JSON."""
    guarantee, weights = statement["guarantee"], statement["hashes"]["weights"]
    kind = _KINDS.get(statement["settings"]["model"]["kind"], "encoder")
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(statement["hashes"], sort_keys=True))
    shown: dict[str, Any] = {"run_id": statement["run_id"], "recipe": statement["recipe"]}
    if guarantee is not None:
        unit = statement["scope"]["unit"]["sampling_unit"]
        said = Stated.of(unit, guarantee["epsilon"], guarantee["unit_epsilon"])
        shown |= {"epsilon": up(said.epsilon, 4), "delta": guarantee["delta"], "unit": said.whom}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "timestamp": f"{declared.publication_date}T00:00:00Z",
            "authors": [{"name": name} for name in declared.curators],
            "component": {
                "type": "machine-learning-model",
                "bom-ref": statement["run_id"],
                "name": declared.name,
                "description": statement["headline"],
                "components": [
                    {
                        "type": "file",
                        "name": name,
                        "hashes": [{"alg": "SHA-256", "content": digest}],
                    }
                    for name, digest in weights.items()
                ],
                "modelCard": {
                    "modelParameters": {
                        "approach": {
                            "type": "self-supervised" if kind == "encoder" else "supervised"
                        },
                        "task": PIPELINES[kind],
                        "modelArchitecture": statement["recipe"],
                        "datasets": [
                            {
                                "type": "dataset",
                                "name": entry["store_id"] or "weights without a store",
                                "classification": entry["visibility"],
                                "description": entry["text"],
                            }
                            for entry in statement["history"]["lineage"]
                        ],
                    },
                    "quantitativeAnalysis": {
                        "performanceMetrics": [
                            {
                                "type": f"{score['name']}: {score['protocol']}",
                                "value": f"{score['value']:.4f}",
                                "slice": score["test_data"],
                                "confidenceInterval": {
                                    "lowerBound": f"{score['low']:.4f}",
                                    "upperBound": f"{score['high']:.4f}",
                                },
                            }
                            for score in statement["scores"]
                        ]
                    },
                    "considerations": {
                        "useCases": [declared.intended_use],
                        "technicalLimitations": statement["scope"]["not_covered"],
                        "ethicalConsiderations": [
                            {
                                "name": "Privacy of the people and images behind the training set",
                                "mitigationStrategy": _lines(
                                    statement["headline"], *statement["in_words"]
                                ),
                            }
                        ],
                    },
                    "properties": [
                        {"name": f"dpvision:{name}", "value": str(value)}
                        for name, value in shown.items()
                    ],
                },
            },
        },
        "components": [
            {
                "type": "library",
                "name": name,
                "version": version,
                "purl": f"pkg:pypi/{name}@{version}",
            }
            for name, version in statement["versions"].items()
            if name != "python"
        ],
    }


def _lines(*texts: str) -> str:
    return "\n".join(texts)


_MADE: dict[Form, tuple[str, Callable[[dict[str, Any], Declared], dict[str, Any]]]] = {
    "opendp": ("entry.yaml", opendp_entry),  # JSON is YAML too
    "cyclonedx": ("bom.cdx.json", cyclonedx_bom),
}
