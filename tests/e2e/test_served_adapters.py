"""A server with two adapters on real engines, also after the death of a generator."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e.runs import process_writing_to
from peft_files import BASE, write_adapter

pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from titan_rl.training.models.peft_settings import WEIGHTS, hf_name

ROOT = Path(__file__).parents[2]
PROMPT = [5, 9, 14, 33, 60, 7]


def make_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter with random matrices."""
    write_adapter(folder)
    generator = torch.Generator().manual_seed(seed)
    zeros = load_file(folder / WEIGHTS)
    save_file(
        {name: torch.randn(each.shape, generator=generator) * 0.02 for name, each in zeros.items()}, folder / WEIGHTS
    )
    return folder


@functools.cache
def merged_model(adapter: Path | None) -> Any:
    """The base model of transformers, with an adapter merged."""
    model: Any = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    if adapter is not None:
        matrices = {hf_name(name): each for name, each in load_file(adapter / WEIGHTS).items()}
        for name, weight in model.state_dict().items():
            layer = name.removesuffix(".weight")
            if (a := matrices.get(f"{layer}.lora_A.weight")) is not None:
                weight += 16 * matrices[f"{layer}.lora_B.weight"] @ a
    return model


def expected_logprobs(adapter: Path | None, tokens: list[int]) -> torch.Tensor:
    """Logprobs of tokens after the prompt, by transformers with the adapter merged.  # [num_tokens]"""
    with torch.no_grad():
        logits = merged_model(adapter)(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Address of a running server."""
    adapters = ", ".join(f'{name} = "{make_adapter(tmp_path / name, seed)}"' for seed, name in enumerate(("a", "b")))
    options = ["--generation.num_generators", "1", "--generation.kv_cache_gib", "0.1", "--model.max_context", "128"]
    options += ["--server.port", "0", "--server.adapters", f"{{ {adapters} }}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "titan_rl.cli.main", "serve", str(BASE), *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        assert "OPENAI_BASE_URL=" in lines[1], (lines, process.communicate(timeout=240))
        yield lines[1].split("=")[1].removesuffix("/v1 OPENAI_API_KEY")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_requests_select_adapters_even_after_generator_death(server: str, tmp_path: Path) -> None:
    def ask(model: str) -> Any:
        sampling = {"max_tokens": 12, "logprobs": 0, "seed": 1}
        body = {"model": model, "token_ids": PROMPT, "sampling_params": sampling}
        answer = httpx.post(f"{server}/inference/v1/generate", json=body, timeout=300).raise_for_status().json()
        assert answer["model"] == model
        return answer["choices"][0]

    def check() -> None:
        with ThreadPoolExecutor(12) as threads:
            names = ["policy", "a", "b"] * 4
            for name, choice in zip(names, threads.map(ask, names), strict=True):
                found = torch.tensor([each["logprob"] for each in choice["logprobs"]["content"]])
                adapter = None if name == "policy" else tmp_path / name
                torch.testing.assert_close(found, expected_logprobs(adapter, choice["token_ids"]), rtol=0, atol=1e-4)

    cards = httpx.get(f"{server}/v1/models").json()["data"]
    assert [(card["id"], card["weight_version"]) for card in cards] == [("policy", "0"), ("a", "1"), ("b", "1")]
    refused = httpx.post(f"{server}/v1/completions", json={"model": "c", "prompt": "Sort", "max_tokens": 1})
    assert refused.status_code == 404
    assert "there is no model of this name; this server has 'policy', 'a', 'b'" in refused.text
    chat = {"model": "b", "messages": [{"role": "user", "content": "Sort."}], "max_tokens": 3}
    assert httpx.post(f"{server}/v1/chat/completions", json=chat, timeout=300).json()["model"] == "b"
    check()
    (logs,) = tmp_path.glob("titan_rl-serve-*/logs")
    os.kill(process_writing_to(logs / "generator-0.log"), signal.SIGKILL)
    check()
