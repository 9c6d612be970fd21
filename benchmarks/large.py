"""Costs of large models, long contexts and long runs: memory of a rank, and memory and time of a token and a step.

    python -m benchmarks.large [--ranks 4] [--megabytes 400] [--only memory|tokens]

Peaks are the growth of the process's resident memory, as the kernel counts it (VmHWM). Each part runs in processes of
its own. Prints one JSON object per line: {"name": ..., "value": ..., "target": ..., "unit": ...}, with the figure of a
simpler method measured in the same run: {"before": ..., "before_is": ...}. Names that end with "_70b_64_gpus" show what
a figure means for a 70B model on 64 GPUs: computed, not measured.

- `--only memory` measures a trainer's ranks (`benchmarks/trainer_memory.py`): `rank_peak_vs_shard`,
  `fsdp_kept_vs_weights`, `logprob_peak_bytes_vs_vocab`, `context_parallel_peak_vs_1`, `export_peak_vs_model` and
  `publish_peak_vs_version`.
- `--only tokens` measures tokens (`benchmarks/token_path.py`): `tokens_per_second_through_the_controller`,
  `memory_a_token`, `journal_bytes_100_turns_56k`, `so_far_ms_32k` and related figures; and long runs
  (`benchmarks/long_runs.py`): `report_peak_mb_10k_steps`, `resume_s_10k_steps`, `journal_read_peak_mb`.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))  # returns freed memory to the kernel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=400, help="of the model whose ranks are started, about")
    parser.add_argument("--only", choices=("memory", "tokens"), help="leave the others out")
    arguments = parser.parse_args()
    if arguments.only != "memory":
        from benchmarks.long_runs import report_long_runs
        from benchmarks.token_path import report_token_path

        report_token_path()
        report_long_runs()
    if arguments.only != "tokens":
        from benchmarks.trainer_memory import report_trainer_memory

        report_trainer_memory(arguments.ranks, arguments.megabytes)


if __name__ == "__main__":
    main()
