"""Generate the folder of a synthetic run of any size, for the viewer's tests, benchmark and screenshots.

    python benchmarks/synthetic_run.py FOLDER [--steps 100] [--rollouts 800] [--seed 0] [--turns 2] [--tokens 40]
                                       [--state finished|running|stopped|failed]

Equal arguments give equal files. The policy learns to sort: its reward rises, its entropy and its length fall.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from typing import Any, Literal

import msgspec

from titan_rl.core.run_files import RunStatus

STATUSES = {"completed": 90, "truncated_length": 6, "error_parse": 3, "error_env": 1}
TASKS = ("sort", "countdown")
GROUP_SIZE = 8
STEP_S = 2.0
BEGAN = 1_767_225_600.0
NAMES = ("Anna", "Bo", "Cé", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jun", "🙂", "<b>Kim</b>")
VERSIONS_PER_TURN = 2

Record = dict[str, Any]


def write_run(
    folder: Path,
    *,
    steps: int = 100,
    rollouts: int = 800,
    seed: int = 0,
    turns: int = 2,
    tokens: int = 40,
    state: Literal["finished", "running", "stopped", "failed"] = "finished",
) -> Path:
    """Write a run's files, and return the folder.

    Args:
        rollouts: total number, in groups of `GROUP_SIZE`, the same in all steps. Every tenth step has a validation.
        turns: maximum per rollout.
        tokens: approximate number per completion.
        state: state that the run reports. A "running" run looks killed unless a process locks the file `lock`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    write_config(folder, steps)
    with (folder / "metrics.jsonl").open("wb") as file:
        for step in range(steps + 1):
            file.writelines(line(record) for record in metric_records(step, steps, chance))
    with (folder / "rollouts.jsonl").open("wb") as file:
        for place in range(rollouts):
            file.write(line(rollout_record(place, rollouts, steps, turns, tokens, chance)))
    reason = {"failed": "TrainingError: the loss is nan at step 57; lower training.lr", "stopped": "stopped by Ctrl-C"}
    ended = None if state == "running" else BEGAN + steps * STEP_S
    RunStatus(state, BEGAN, ended=ended, reason=reason.get(state, "")).write(folder)
    return folder


def line(record: Record) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def write_config(folder: Path, steps: int) -> None:
    text = f'seed = 0\n\n[model]\npath = "base"\n\n[training]\nsteps = {steps}\nlr = 0.0003\nloss = "grpo"\n'
    for task in TASKS:
        text += f'\n[[tasks]]\nname = "{task}"\ntype = "my_tasks:{task.title()}Task"\n'
    (folder / "config.toml").write_text(text, encoding="utf-8")


def metric_records(step: int, steps: int, chance: random.Random) -> list[Record]:
    """Lines of a step in `metrics.jsonl`; step 0 and every tenth step have a validation."""
    learned = 1 - math.exp(-3 * step / max(1, steps))
    reward = 0.25 + 0.65 * learned
    records: list[Record] = []
    if step:
        noisy = {task: reward + chance.gauss(0, 0.04) for task in TASKS}
        seconds = STEP_S * (1 + 0.1 * chance.random())
        tokens = 40 - 12 * learned + chance.gauss(0, 1)
        records.append(
            {
                "step": step,
                "time_s": round(step * STEP_S, 3),
                "rollout/num_groups": 16.0,
                "rollout/num_rollouts": 128.0,
                "rollout/reward_mean": sum(noisy.values()) / len(noisy),
                "rollout/finished_reward_mean": sum(noisy.values()) / len(noisy) - 0.02,
                "rollout/reward_std": 0.3 - 0.1 * learned,
                "rollout/reward/similarity": noisy["sort"],
                "rollout/reward/well_formed": min(1.0, 0.7 + 0.3 * learned),
                "rollout/zero_variance_groups": 0.1 + 0.2 * learned,
                "rollout/completion_tokens_mean": tokens,
                "rollout/completion_tokens_max": tokens * 1.9,
                "rollout/turns_mean": 1.6,
                **{f"rollout/status/{name}": weight / 100 for name, weight in STATUSES.items()},
                **{f"task/{task}/finished_reward_mean": value for task, value in noisy.items()},
                **{f"task/{task}/share": 0.5 for task in TASKS},
                "train/loss": chance.gauss(0, 0.02),
                "train/grad_norm": 0.5 + chance.expovariate(4),
                "train/entropy": 1.4 - 0.9 * learned + chance.gauss(0, 0.02),
                "train/kl": 0.02 * learned + 0.002 * chance.random(),
                "train/clip_fraction": 0.05 * chance.random(),
                "train/lr": 3e-4,
                "train/staleness_mean": chance.random(),
                "train/staleness_max": float(chance.randint(0, 2)),
                "time/step_s": seconds,
                "time/wait_for_rollouts_s": 0.4 * seconds * chance.random(),
                "throughput/tokens_per_s": 128 * tokens / seconds,
                "sync/pull_s": 0.02 + 0.005 * chance.random(),
                "sync/publish_s": 0.03 + 0.005 * chance.random(),
                "sync/probe_diff": 1e-6 * chance.random(),
                "scheduling/wait_s": chance.random(),
            }
        )
    if step % 10 == 0:
        held_out = {"validation/reward_mean": reward + chance.gauss(0, 0.02), "validation/num_rollouts": 64.0}
        records.append({"step": step, "time_s": round(step * STEP_S + 0.2, 3), **held_out})
    return records


def rollout_record(place: int, rollouts: int, steps: int, turns: int, tokens: int, chance: random.Random) -> Record:
    """A line of `rollouts.jsonl`."""
    step = 1 + place * steps // max(1, rollouts)
    group, sibling = divmod(place, GROUP_SIZE)
    learned = 1 - math.exp(-3 * step / max(1, steps))
    (status,) = chance.choices(list(STATUSES), list(STATUSES.values()))
    is_fault = status == "error_env"
    reward = None if is_fault else round(min(1.0, max(0.0, 0.25 + 0.65 * learned + chance.gauss(0, 0.2))), 4)
    advantage = None if reward is None else round(reward - 0.25 - 0.65 * learned, 4)
    dropped = group % 16 == 15
    names = chance.sample(NAMES, 4)
    messages: list[Record] = [{"role": "user", "content": f"Sort: {', '.join(names)}"}]
    played: list[Record] = []
    context = 0
    for turn in range(1 + group % max(1, turns)):
        if turn:
            messages.append({"role": "user", "content": f"Now without {names[turn]}."})
        prompt = ["<|user|>", *pieces_of(str(messages[-1]["content"])), "<|assistant|>"]
        answer = [*pieces_of(", ".join(chance.choices(NAMES, k=max(1, tokens // 3)))), "<|end|>"]
        messages.append({"role": "assistant", "content": "".join(answer[:-1])})
        logprobs = [round(-chance.expovariate(2.5), 4) for _ in answer]
        older = len(answer) // VERSIONS_PER_TURN if sibling % 2 else 0
        spans = (
            [[step - 1, len(answer) - older]]
            if not older
            else [[max(0, step - 2), older], [step - 1, len(answer) - older]]
        )
        played.append(
            {
                "request_id": f"train-{group}/{sibling}/{turn}",
                "num_prompt_tokens": context + len(prompt),
                "num_completion_tokens": len(answer),
                "finish_reason": "length" if status == "truncated_length" else "stop",
                "version_spans": spans,
                "rewards": {},
                "sampling": {"max_tokens": 2 * tokens, "temperature": 1.0},
                "tokens": {
                    "shared": context,
                    "prompt": {"ids": ids_of(prompt), "text": prompt},
                    "completion": {"ids": ids_of(answer), "text": answer, "logprobs": logprobs},
                    "trained": advantage is not None and not dropped,
                    "advantages": advantage,
                },
            }
        )
        context += len(prompt) + len(answer)
    return {
        "step": step,
        "phase": "validation" if step % 10 == 0 and not dropped and group % 2 else "train",
        "task": TASKS[group % len(TASKS)],
        **({"dropped": "zero_variance"} if dropped else {}),
        "rollout_id": f"train-{group}/{sibling}",
        "group_id": f"train-{group}",
        "sibling": sibling,
        "status": status,
        "error": "ValueError: the environment's dictionary has no such name" if is_fault else None,
        "reward": reward,
        "reward_breakdown": {} if reward is None else {"similarity": reward, "well_formed": 1.0},
        "advantage": advantage,
        "messages": messages,
        "num_completion_tokens": sum(turn["num_completion_tokens"] for turn in played),
        "versions": sorted({version for turn in played for version, _ in turn["version_spans"]}),
        "turns": played,
        "metrics": {"seconds": round(chance.expovariate(2), 3)},
    }


def pieces_of(text: str) -> list[str]:
    """Pieces of a text, split as by a tokenizer: at spaces, and names in two.

    A character of several tokens belongs to the last of them.
    """
    pieces: list[str] = []
    for word in text.split(" "):
        head = f" {word}" if pieces else word
        cut = ["", head] if "🙂" in head else [head[:3], head[3:]] if len(head) > 3 else [head]
        pieces += cut
    return pieces


def ids_of(pieces: list[str]) -> list[int]:
    return [sum(map(ord, piece)) % 50_000 for piece in pieces]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in {"steps": 100, "rollouts": 800, "seed": 0, "turns": 2, "tokens": 40}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--state", default="finished")
    print(write_run(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
