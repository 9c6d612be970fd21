"""One rank of a trainer under test: `python -m e2e.sharded_steps SETTINGS`, in torch.distributed's environment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from e2e.tiny_policy import on_policy_samples

from titan_rl.config.sections import ModelConfig
from titan_rl.config.training import CorrectionConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore

LENGTHS = (50, 20, 33, 41, 64, 12, 27)


def three_steps(folder: Path, out: Path, *, resume: Path | None = None, **training: Any) -> list[dict[str, float]]:
    """Three steps, a checkpoint and an export in `out`, and with `resume` one step more from that checkpoint."""
    settings = TrainingConfig(**{"steps": 10, "lr": 1e-4, "row_tokens": 64, "rows_per_micro_batch": 2, **training})
    correction = CorrectionConfig(proximal="recomputed", weight="token", cap=2.0)
    trainer = TrainerCore(ModelConfig(path=str(folder)), settings, correction, seed=0)
    samples = on_policy_samples(trainer, *LENGTHS)
    metrics = [trainer.step(samples).metrics for _ in range(3)]
    trainer.save(out / "checkpoint")
    trainer.export_hf(out / "export")
    if resume is not None:
        trainer.load(resume)
        metrics.append(trainer.step(samples).metrics)
    return metrics


def run_ranks(folder: Path, out: Path, num_ranks: int, **settings: Any) -> list[list[dict[str, float]]]:
    """`three_steps` in a world of processes; what each rank returns."""
    return run_world("e2e.sharded_steps", {"folder": str(folder), "out": str(out), "settings": settings}, num_ranks)


def run_world(module: str, request: dict[str, Any], num_ranks: int) -> list[Any]:
    """`python -m MODULE REQUEST` in each process of a world; what each one's last line of output says."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(request, default=str)],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, stderr) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, stderr
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs]


def main() -> None:
    request = json.loads(sys.argv[1])
    settings = request["settings"]
    if settings.get("resume"):
        settings["resume"] = Path(settings["resume"])
    metrics = three_steps(Path(request["folder"]), Path(request["out"]), **settings)
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
