"""Make an untrained model.

python -m examples.bandit.base_model --out examples/bandit/base
"""

from __future__ import annotations

import argparse
from pathlib import Path

from titan_rl.training.tiny_model import make_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write, in Hugging Face format")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make_tiny_model(args.out, texts=(), level="byte", parameters=100_000, max_context=64, seed=args.seed))


if __name__ == "__main__":
    main()
