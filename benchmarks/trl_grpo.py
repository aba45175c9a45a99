"""The other side of time_to_reward.py and race_half_billion.py: TRL's GRPOTrainer with PEFT, in TRL's own environment.

Model, prompts, sizes, LoRA and the optimizer's numbers come by the command line from Tandem's configuration, so
that they cannot differ. The rest is the fastest setting of TRL on a CPU: its own generation with a cache, no gradient
checkpointing, no reference model (beta = 0). With bf16 the whole base is loaded in bf16, which TRL recommends, and PEFT
keeps the adapter in fp32; mixed precision over an fp32 base takes more time and memory. On a card the model's folder
has NF4 codes, computed with in bf16, and gradients are checkpointed, as is usual with little memory. Stops when the
mean reward of five steps reaches the target. Takes nothing of Tandem but the reward in the file beside it, and is
started with -P: transformers would take a module of this folder for a package of the same name.
"""

import argparse
import json
import re
import runpy
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

OPTIMIZER = ("--lr", "--beta1", "--beta2", "--weight-decay", "--max-grad-norm")
SIZES = ("--prompts", "--group", "--micro-batch", "--tokens", "--rank", "--alpha", "--max-steps", "--threads", "--seed")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def right_answer(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1.0 where the number after the last #### is the gold one."""
    return [float(last_number(text[0]["content"]) == gold) for text, gold in zip(completions, answer, strict=True)]


def last_number(text: str) -> str | None:
    """The number after the last ####."""
    found = re.findall(r"####\s*(-?\d+)", text)
    return found[-1] if found else None


PARITY = runpy.run_path(str(Path(__file__).with_name("parity_reward.py")))["parity"]
REWARDS = {"answer": right_answer, "parity": PARITY}


class Watch(TrainerCallback):
    """Notes reward, time, length and gradient of each step; stops at the target."""

    def __init__(self, target: float, out: Path) -> None:
        """out: is written after every step."""
        self.target, self.out = target, out
        self.started = 0.0
        self.rows: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.started = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **rest: Any) -> None:
        if logs and "reward" in logs:
            self.rows.append(
                {
                    "reward": logs["reward"],
                    "time_s": time.monotonic() - self.started,
                    "length": logs["completions/mean_length"],
                    "grad_norm": float(logs["grad_norm"]),
                    **card_memory(),
                }
            )
            written = self.out.with_suffix(".new")
            written.write_text(json.dumps(self.rows))
            written.replace(self.out)
            last = [row["reward"] for row in self.rows[-5:]]
            if len(last) == 5 and sum(last) / 5 >= self.target:
                control.should_training_stop = True


def card_memory() -> dict[str, float]:
    """MiB at most so far; empty without a card."""
    if not torch.cuda.is_initialized():
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated_mib": round(allocated / 2**20, 1), "reserved_mib": round(reserved / 2**20, 1)}


def main() -> None:
    """Train and write the curve."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--tasks", "--target", "--out", *SIZES, *OPTIMIZER):
        parser.add_argument(name, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--reward", choices=REWARDS, required=True)
    args = parser.parse_args()
    torch.set_num_threads(int(args.threads))
    rows = [json.loads(line) for line in Path(args.tasks).read_text().splitlines()]
    dataset = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    watch = Watch(float(args.target), Path(args.out))
    trainer = GRPOTrainer(
        model=load(args),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        reward_funcs=REWARDS[args.reward],
        args=settings(args),
        train_dataset=Dataset.from_list(dataset),
        peft_config=LoraConfig(
            r=int(args.rank),
            lora_alpha=int(float(args.alpha)),
            lora_dropout=0.0,
            target_modules=TARGETS,
            task_type="CAUSAL_LM",
        ),
        callbacks=[watch],
    )
    trainer.train()


def load(args: argparse.Namespace) -> Any:
    """The model; codes are read onto the card, which cannot be moved there later."""
    place = {"device_map": {"": 0}} if args.device == "cuda" else {}
    return AutoModelForCausalLM.from_pretrained(args.model, dtype=DTYPES[args.dtype], **place)


def settings(args: argparse.Namespace) -> GRPOConfig:
    """Everything but model, data and LoRA."""
    return GRPOConfig(
        output_dir=str(Path(args.out).with_suffix("")),
        use_cpu=args.device == "cpu",
        bf16=args.device == "cuda",
        gradient_checkpointing=args.device == "cuda",
        learning_rate=float(args.lr),
        lr_scheduler_type="constant",
        adam_beta1=float(args.beta1),
        adam_beta2=float(args.beta2),
        adam_epsilon=1e-8,
        weight_decay=float(args.weight_decay),
        max_grad_norm=float(args.max_grad_norm),
        per_device_train_batch_size=int(args.micro_batch),
        # All completions of a step are sampled at once, however many micro-batches they are learned from.
        gradient_accumulation_steps=int(args.prompts) * int(args.group) // int(args.micro_batch),
        num_generations=int(args.group),
        max_completion_length=int(args.tokens),
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        max_steps=int(args.max_steps),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=int(args.seed),
    )


if __name__ == "__main__":
    main()
