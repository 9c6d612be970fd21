"""SkyRL's side of `benchmarks/vs_skyrl.py`, which runs in SkyRL's environment.

    python -m benchmarks.skyrl_run SETTINGS.json    # prints the seconds at which each step ended, and its mean reward

It starts SkyRL's server, which samples and trains with JAX, and is a client of it that does what a user of the Tinker
API would write: sample groups, score them, and ask for a gradient and a step of the optimizer. Requests that do not
depend on each other are under way together.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from benchmarks.vs_trl import GROUPS, LR, SIBLINGS, TASKS

PORT = 18600
RANK = 32
SAMPLED_TOGETHER = 32
"""Sequences that the server samples together. A smaller batch is padded to it, and the first of the requests of a step
often arrives alone."""
START_S = 300.0  # time limit of the server's start
STEP_S = 300.0  # time limit of each call of a step; the first one compiles


@contextlib.contextmanager
def server(base: str, folder: Path) -> Generator[str]:
    """Context manager: run SkyRL's server, and yield its address."""
    binaries = Path(sys.executable).parent
    backend = {"max_lora_adapters": 2, "max_lora_rank": RANK, "sample_max_num_sequences": SAMPLED_TOGETHER}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [
                *(binaries / "uv", "run", "--no-project", "--python", sys.executable, "-m", "skyrl.tinker.api"),
                *("--base-model", base, "--backend", "jax", "--backend-config", json.dumps(backend)),
                *("--host", "127.0.0.1", "--port", str(PORT)),
                *("--checkpoints-base", folder / "checkpoints", "--database-url", f"sqlite:///{folder}/tinker.db"),
            ],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PATH": f"{binaries}:{os.environ['PATH']}"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            address = f"http://127.0.0.1:{PORT}"
            wait_for(f"{address}/api/v1/healthz", process)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(60.0)
            finally:
                process.kill()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                raise
            time.sleep(0.5)


def train(settings: dict[str, Any], address: str) -> dict[str, list[float]]:
    tinker: Any = importlib.import_module("tinker")  # an import would fail where types are checked
    transformers: Any = importlib.import_module("transformers")
    comparison = TASKS[settings["task"]]
    task: Any = comparison.task()
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["base"])
    service = tinker.ServiceClient(base_url=address, api_key="tml-local")
    learner = service.create_lora_training_client(settings["base"], rank=RANK, seed=settings["seed"])
    sampling = tinker.SamplingParams(max_tokens=comparison.max_tokens, stop=[tokenizer.eos_token_id])
    adam = tinker.AdamParams(learning_rate=LR, beta2=0.95, eps=1e-8, weight_decay=0.0)
    seconds: list[float] = []
    rewards: list[float] = []
    began = time.monotonic()
    sampler = learner.save_weights_and_get_sampling_client()
    for step in range(settings["steps"]):
        samples = [task.train_sample(settings["seed"], step * GROUPS + group) for group in range(GROUPS)]
        prompts = [prompt_of(tokenizer, task.question(sample)) for sample in samples]
        answers = [sampler.sample(tinker.ModelInput.from_ints(prompt), SIBLINGS, sampling) for prompt in prompts]
        data: list[Any] = []
        scores: list[float] = []
        for sample, prompt, answer in zip(samples, prompts, answers, strict=True):
            sequences = answer.result(STEP_S).sequences
            texts = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences]
            group = [task.score(sample, text) for text in texts]
            scores += group
            for sequence, reward in zip(sequences, group, strict=True):
                advantage = (reward - fmean(group)) / (pstdev(group) + 1e-4)
                data.append(datum(tinker, prompt, sequence, advantage))
        clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
        updates = learner.forward_backward(data, "ppo", clip), learner.optim_step(adam)
        sampler = learner.save_weights_and_get_sampling_client()
        for update in updates:
            update.result(STEP_S)
        seconds.append(time.monotonic() - began)
        rewards.append(fmean(scores))
    return {"seconds": seconds, "rewards": rewards}


def prompt_of(tokenizer: Any, question: str) -> list[int]:
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


def datum(tinker: Any, prompt: list[int], sequence: Any, advantage: float) -> Any:
    """Training example whose loss covers only the tokens of the answer."""
    tokens = prompt + sequence.tokens
    before = [0.0] * (len(prompt) - 1)
    count = len(sequence.tokens)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": before + [1.0] * count,
            "logprobs": before + sequence.logprobs,
            "advantages": before + [advantage] * count,
        },
    )


def main() -> None:
    path = Path(sys.argv[1])
    settings = json.loads(path.read_text())
    with server(settings["base"], path.parent) as address:
        print(json.dumps(train(settings, address)), flush=True)


if __name__ == "__main__":
    main()
