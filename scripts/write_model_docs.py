"""Write docs/reference/models.md from the results of `make test-models` and the refused families:
`python -m scripts.write_model_docs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.models.families import ENGINE_PROBLEMS, FAMILIES, ON_ONE_RANK, REPLAY_PROBLEMS, RESULTS, model_type
from titan_rl.training.models.families import REFUSED, choose_implementation

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "models.md"

HEAD = """\
# Model families

Each row is a model family, named as `model_type` in config.json; text after a comma names a variant. The column
*implementation* shows what `model.implementation = "auto"` selects for a typical
config.json ([models](../concepts/training.md#models)).

For each row, `make test-models` creates a tiny model with random weights, checks it on a CPU, and records the results.
These checks use the transformers implementation, also in rows with torchtitan, which has
[separate tests](../concepts/training.md#models). A dash means that there is nothing to check.

| column | check |
|---|---|
| logprobs | the trainer's logprobs equal those of transformers' eager forward pass in float64 |
| engine | vLLM's logprobs equal the trainer's: for an exported model, and after three hot swaps during requests |
| gradients | the gradients of packed sequences equal those of separate sequences |
| 2 ranks | training with FSDP on two ranks equals training on one |
| export | transformers loads the exported model and computes the trainer's logprobs |
| resume | the first step after a resume is bit-identical to that of an uninterrupted trainer |
| replay | a mixture of experts uses the experts that it is given (router replay), instead of choosing them |
| CP 2 | two ranks that share each row (`training.context_parallel`) have the logprobs and gradients of one |
| EP 2 | two ranks that divide the experts (`training.expert_parallel`) have the logprobs and gradients of one |

Layers that pass a state from token to token (gated delta rule, Mamba, short convolutions) are transformers' own. They
compute each document of a packed row by itself, from its own beginning, with the prompt that it shares; so a shared
prompt passes through them once for each sample. Their logprobs may differ from transformers' by four times the rounding
of transformers' own forward pass in float32, or by 2e-5 nats if that is more, and by at most 2e-4 nats: transformers
computes the gated delta rule in float32 for any dtype of the model.

Context parallelism divides the tokens in titan_rl's attention, which has all of a family's variants. So it also works
for a family without a row, if the check of packed sequences that the trainer makes before it starts shows that tokens
mix nowhere else. The experts of such a family are not divided: `training.expert_parallel` is refused.

If the column *engine* has "no", it gives the reason why vLLM's logprobs differ from the trainer's, or why vLLM cannot
run the model, on a CPU with the installed version. For `apertus`, the tests show that the probes detect
the difference after a swap, so a run with one of these families ends with an error at its first pull. Trained weights
from the hub, GPUs and bfloat16 are not part of these checks.

This page is generated from `tests/models/results.json` and `titan_rl/training/models/families.py` by
`scripts/write_model_docs.py`.

| family | implementation | logprobs | engine | gradients | 2 ranks | export | resume | replay | CP 2 | EP 2 |
|---|---|---|---|---|---|---|---|---|---|---|
"""

REFUSED_HEAD = """
## Refused

A run with one of these families is refused before it starts. The same applies to quantized models, multimodal models,
and encoder-decoder models.

| family | reason |
|---|---|
"""


def page() -> str:
    """Make the text of the page."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = [row(name, results[name]) for name in sorted(FAMILIES)]
    refused = [f"| `{name}` | {reason} |\n" for name, reason in sorted(REFUSED.items())]
    return "".join([HEAD, *rows, REFUSED_HEAD, *refused])


def row(name: str, results: Mapping[str, str]) -> str:
    """Make the row of a family.

    Args:
        results: Results by the letters of the checks, which are in the order of the columns.
    """
    base, _, variant = name.partition(",")
    implementation = choose_implementation({"model_type": model_type(name), **FAMILIES[name]}).name
    cells = dict(sorted(results.items()))
    problems_of_ranks = {name: ON_ONE_RANK}
    for check, problems in (("b", ENGINE_PROBLEMS), ("g", REPLAY_PROBLEMS), ("h", problems_of_ranks)):
        if cells[check] == "no":
            cells[check] = f"no: {problems[name]}"
    return f"| `{base}`{',' if variant else ''}{variant} | {implementation} | {' | '.join(cells.values())} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
