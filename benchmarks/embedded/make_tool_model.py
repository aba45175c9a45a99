"""Makes `shared/embedded/tools/` from nothing.

    python -m benchmarks.embedded.make_tool_model [--out DIR] [--steps N] [--seed N]

    tokenizer -> random Qwen2 weights -> `steps` AdamW steps on fresh conversations with tools -> files

`tandem eval` of a run with the presets `calculator` and `guessing_game` says how often it is right.
"""

import argparse
from pathlib import Path

from benchmarks.embedded.pretraining import make, pin_environment
from benchmarks.embedded.tool_corpus import conversations, tool_tokenizer
from shared.embedded import EMBEDDED


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.embedded.make_tool_model")
    parser.add_argument("--out", type=Path, default=EMBEDDED["embedded-tools"], help="folder (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2400, help="pretraining steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, texts and tokenizer (default: %(default)s)")
    args = parser.parse_args()
    pin_environment("benchmarks.embedded.make_tool_model")
    tokenizer = tool_tokenizer(args.seed)
    make(args.out, tokenizer, conversations(tokenizer), num_steps=args.steps, seed=args.seed)


if __name__ == "__main__":
    main()
