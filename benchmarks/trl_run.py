"""TRL's side of `benchmarks/vs_trl.py`, and the evaluation of both sides.

    python -m benchmarks.trl_run train SETTINGS.json      # prints the seconds at which each step ended
    python -m benchmarks.trl_run evaluate SETTINGS.json   # prints the held-out reward of each policy

Each prints a line of JSON. `train` is what a user of TRL would write (a dataset of chat prompts, a reward function,
`GRPOTrainer`), except for the weight sync of its vLLM mode: TRL 1.16 loads weights into vLLM's modules one by one,
which fails on a CPU, where vLLM packs them after loading. Here vLLM loads all of them again, as it does itself. With
tools, TRL describes, parses and calls them itself, but its prompts have the tokens of titan_rl's renderer.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import parse_response, qwen3_template
from trl.generation.vllm_generation import VLLMGeneration

from benchmarks.vs_trl import GROUPS, SAVED_EVERY, SIBLINGS, TASKS, Comparison
from titan_rl.rollout.renderer.registry import choose_renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.tasks.tools import Tool

HELD_OUT, ANSWERS = 64, 4


class Stopwatch(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            self.seconds.append(time.monotonic() - self._began)


def reload_weights(generation: Any) -> None:
    weights = {name: parameter.data for name, parameter in generation.model.named_parameters()}
    if generation.model.config.tie_word_embeddings:
        weights["lm_head.weight"] = generation.model.get_input_embeddings().weight.data
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights.items())})
    generation.llm.reset_prefix_cache()


class ToolChats:
    """Tokens of chats with tools: on both sides those of titan_rl's renderer, from which the base model has learned.
    The chat template has other tokens where the result of a tool begins."""

    def __init__(self, folder: str, comparison: Comparison) -> None:
        self._renderer = choose_renderer(load_tokenizer(folder)).renderer
        self._schemas: list[Any] = [Tool.of(tool).schema for tool in comparison.tools]

    def opening(self, messages: list[Any]) -> list[int]:
        """The first prompt."""
        return list(self._renderer.render_ids(messages, tools=self._schemas, add_generation_prompt=True))

    def after(self, prompt: list[int], completion: list[int], results: list[Any]) -> list[int]:
        """The next prompt, after the results of the calls in a completion."""
        bridged = self._renderer.bridge_to_next_turn(prompt, completion, results, tools=self._schemas)
        assert bridged is not None
        return list(bridged.token_ids)


class ToolTrainer(GRPOTrainer):
    """Trainer that appends the results of tools with the tokens of `ToolChats`."""

    tool_chats: ToolChats

    def _get_tool_suffix_ids(self, tool_messages: list[Any]) -> list[int]:
        prompt = self.tool_chats.opening([{"role": "user", "content": "Call a tool."}])
        tokenizer: Any = self.processing_class
        completion = [tokenizer.eos_token_id]
        return self.tool_chats.after(prompt, completion, tool_messages)[len(prompt) + len(completion) :]


def tokenizer_of(folder: str, comparison: Comparison) -> Any:
    """Load a tokenizer. For a task with tools, it describes them to the policy as titan_rl does, and parses calls as
    TRL parses those of a Qwen3."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if not comparison.tools:
        return tokenizer
    tokenizer.response_template = qwen3_template
    render = tokenizer.apply_chat_template

    def render_with_schemas(*chats: Any, tools: Any = None, **settings: Any) -> Any:
        schemas = [Tool.of(inspect.unwrap(tool)).schema for tool in tools or ()]
        return render(*chats, tools=schemas or None, **settings)

    tokenizer.apply_chat_template = render_with_schemas
    return tokenizer


def documented(tool: Callable[[int, int], int]) -> Callable[[int, int], int]:
    """The same tool with a description of each argument, which TRL requires."""

    @functools.wraps(tool)
    def call(a: int, b: int) -> int:
        return tool(a, b)

    call.__doc__ = f"{tool.__doc__}\n\nArgs:\n    a: A number.\n    b: A number."
    return call


def train(settings: dict[str, Any]) -> list[float]:
    VLLMGeneration.sync_weights = reload_weights  # pyright: ignore[reportAttributeAccessIssue]
    comparison = TASKS[settings["task"]]
    task: Any = comparison.task()
    samples = [task.train_sample(settings["seed"], index) for index in range(settings["steps"] * GROUPS)]

    def reward(completions: list[Any], index: list[int], **_: Any) -> list[float | None]:
        answers = [final_answer(messages) for messages in completions]
        return [task.score(samples[at], answer) for at, answer in zip(index, answers, strict=True)]

    stopwatch = Stopwatch()
    kind = ToolTrainer if comparison.tools else GRPOTrainer
    trainer = kind(
        model=settings["base"],
        processing_class=tokenizer_of(settings["base"], comparison),
        tools=[documented(tool) for tool in comparison.tools] or None,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict(
            {"prompt": [opening(task, sample) for sample in samples], "index": list(range(len(samples)))}
        ),
        callbacks=[stopwatch],
        args=GRPOConfig(
            output_dir=settings["out"],
            seed=settings["seed"],
            use_cpu=True,
            bf16=False,
            max_steps=settings["steps"],
            per_device_train_batch_size=GROUPS * SIBLINGS,
            num_generations=SIBLINGS,
            shuffle_dataset=False,
            max_completion_length=comparison.max_tokens * comparison.max_turns,
            max_tool_calling_iterations=comparison.max_turns - 1 if comparison.tools else None,
            temperature=1.0,
            top_k=0,
            learning_rate=settings["lr"],
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            scale_rewards="group",
            logging_steps=1,
            save_strategy="steps",
            save_steps=SAVED_EVERY,
            save_only_model=True,
            report_to="none",
            disable_tqdm=True,
            **settings["mode"],
        ),
    )
    if isinstance(trainer, ToolTrainer):
        trainer.tool_chats = ToolChats(settings["base"], comparison)
    trainer.train()
    if settings["steps"] % SAVED_EVERY:
        trainer.save_model(f"{settings['out']}/checkpoint-{settings['steps']}")
    return stopwatch.seconds


def opening(task: Any, sample: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": task.question(sample)}]


def final_answer(messages: list[dict[str, Any]]) -> str:
    """Text of the last message if the policy wrote it, and it calls no tool."""
    last = messages[-1]
    return "" if last["role"] != "assistant" or last.get("tool_calls") else last.get("content") or ""


def evaluate(settings: dict[str, Any]) -> list[float]:
    """Mean reward of each policy on held-out prompts, at temperature 1, with the same random numbers."""
    comparison = TASKS[settings["task"]]
    task: Any = comparison.task()
    samples = [sample for sample in task.validation_samples(HELD_OUT) for _ in range(ANSWERS)]
    rewards: list[float] = []
    for policy in settings["policies"]:
        tokenizer = tokenizer_of(settings["policies"][0], comparison)
        model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
        torch.manual_seed(0)
        chats = [opening(task, sample) for sample in samples]
        play(chats, model, tokenizer, settings["policies"][0], comparison)
        earned = [task.score(sample, final_answer(chat)) for sample, chat in zip(samples, chats, strict=True)]
        rewards.append(fmean(earned))
    return rewards


def play(chats: list[list[dict[str, Any]]], model: Any, tokenizer: Any, folder: str, comparison: Comparison) -> None:
    """Extend chats by answers and the results of the tools that these call, until no answer calls one."""
    if not comparison.tools:
        prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
        for chat, answer in zip(chats, answers_to(prompts, model, tokenizer, comparison.max_tokens), strict=True):
            chat.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        return
    tool_chats = ToolChats(folder, comparison)
    functions = {function.__name__: function for function in comparison.tools}
    playing = [(chat, tool_chats.opening(chat)) for chat in chats]
    for _ in range(comparison.max_turns):
        prompts = [prompt for _, prompt in playing]
        answers = answers_to(prompts, model, tokenizer, comparison.max_tokens)
        following: list[tuple[list[dict[str, Any]], list[int]]] = []
        for (chat, prompt), answer in zip(playing, answers, strict=True):
            chat.append(parse_response(tokenizer, answer, prompt))
            if results := [result_of(call, functions) for call in chat[-1].get("tool_calls") or ()]:
                chat += results
                following.append((chat, tool_chats.after(prompt, answer, results)))
        if not (playing := following):
            return


def result_of(call: dict[str, Any], functions: Mapping[str, Callable[..., int]]) -> dict[str, Any]:
    try:
        content = str(functions[call["function"]["name"]](**call["function"]["arguments"]))
    except Exception as error:  # caused by the policy's arguments
        content = str(error)
    return {"role": "tool", "name": call["function"].get("name"), "content": content}


def answers_to(prompts: list[list[int]], model: Any, tokenizer: Any, max_tokens: int) -> list[list[int]]:
    """Sample an answer to each prompt, up to its first end of text."""
    asked = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    with torch.inference_mode():
        answered = model.generate(
            **asked,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
    answers = answered[:, asked["input_ids"].shape[1] :].tolist()
    end = tokenizer.eos_token_id
    return [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]


def main() -> None:
    settings = json.loads(Path(sys.argv[2]).read_text())
    print(json.dumps({"train": train, "evaluate": evaluate}[sys.argv[1]](settings)))


if __name__ == "__main__":
    main()
