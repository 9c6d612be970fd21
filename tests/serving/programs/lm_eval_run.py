"""Evaluation with `lm-eval` over chat and over text completions: python lm_eval_run.py FOLDER"""

import json
import os
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

TASK = """
task: sky
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{rows}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["!"], max_gen_toks: 32, temperature: 0.0}}
metric_list: [{{metric: exact_match}}]
"""

folder = Path(sys.argv[1])
rows = folder / "rows.jsonl"
rows.write_text("".join(json.dumps({"question": one, "answer": two}) + "\n" for one, two in [("sky", "blue")] * 3))
(folder / "sky.yaml").write_text(TASK.format(rows=rows))
scores = {}
for api, path in (("local-chat-completions", "chat/completions"), ("local-completions", "completions")):
    chat = api == "local-chat-completions"
    results = lm_eval.simple_evaluate(
        model=api,
        model_args={
            "model": "policy",
            "base_url": f"{os.environ['OPENAI_BASE_URL']}/{path}",
            "num_concurrent": 2,
            "max_retries": 1,
            "tokenizer_backend": None if chat else "none",
            **({} if chat else {"tokenized_requests": False}),
        },
        tasks=["sky"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=chat,
        cache_requests=False,
    )
    scores[api] = results["results"]["sky"]["exact_match,none"]
print(json.dumps(scores))
