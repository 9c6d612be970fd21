"""Write docs/reference/models.md from the families that the tests have, and those that are refused:
`python -m scripts.write_model_docs`."""

from __future__ import annotations

from pathlib import Path

from tests.models.families import ENGINE_PROBLEMS, FAMILIES, model_type
from titan_rl.training.models.choice import REFUSED, choose_implementation

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "models.md"

HEAD = """\
# Model families

Each row is a `model_type` of config.json, and after a comma a variant of it. The implementation is that of
`model.implementation = "auto"` for a usual config.json ([models](../concepts/training.md#models)).

`make test-models` makes a tiny model with random weights of each row, and checks on a CPU:

- trainer: logprobs are those of transformers in float64; gradients of packed sequences are those of each sequence
  alone; two ranks make the steps of one; an export has the trainer's logprobs in transformers; a resumed run goes on
  to the bit; given experts of a mixture are replayed. transformers' implementation is used for every row.
- engine: logprobs of vLLM are the trainer's, of an export and after each of three hot swaps with requests running.

"no" says why the engine does not have the trainer's logprobs on a CPU with the installed version of vLLM. The tests
show that the probes of a swap refuse the wrong logprobs of `cohere2` and `apertus`, so that a run with one of them ends
at its first pull. Trained weights from the hub, GPUs and bfloat16 are not part of these checks.

This page is generated from `tests/models/families.py` and `titan_rl/training/models/choice.py` by
`scripts/write_model_docs.py`.

| family | implementation | trainer | engine |
|---|---|---|---|
"""

REFUSED_HEAD = """
## Refused

A run with one of these families is refused before it starts. So are quantized models, models that read more than
text, and models with an encoder.

| family | reason |
|---|---|
"""


def page() -> str:
    """Text of the page."""
    rows = [row(name) for name in sorted(FAMILIES)]
    refused = [f"| `{name}` | {reason} |\n" for name, reason in sorted(REFUSED.items())]
    return "".join([HEAD, *rows, REFUSED_HEAD, *refused])


def row(name: str) -> str:
    base, _, variant = name.partition(",")
    implementation = choose_implementation({"model_type": model_type(name), **FAMILIES[name]}).name
    problem = ENGINE_PROBLEMS.get(name)
    engine = "yes" if problem is None else f"no: {problem}"
    return f"| `{base}`{',' if variant else ''}{variant} | {implementation} | yes | {engine} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
