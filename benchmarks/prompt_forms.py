"""How often is a pretrained model right before any training? The same training problems in several forms of the prompt.

Each form is a set of keys: where the problems come from, the system message, the number of solved examples, the cap,
the temperature. Of each form some training problems are answered as a run samples them. A form is good for training if
some answers are right, many groups have both right and wrong ones, and few answers are cut off. Held-out problems are
left alone, so the choice of a form takes nothing from a later evaluation.

    python -m benchmarks.prompt_forms arithmetic MODEL_FOLDER
    python -m benchmarks.prompt_forms gsm8k MODEL_FOLDER --set tasks.source=GSM8K_FOLDER [--problems 48 --samples 1]
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.machine import write_result
from launch.commands.evaluate import first_adapter
from launch.commands.in_process import LocalActor, LocalFiller, local_actor
from launch.presets.load import load_config
from learner.objective.batch import flat
from learner.orders.orders import build_orders
from learner.tasks.tasks import load_tasks
from learner.update.publisher import policy_message
from protocol.messages import Finish, Group, Outcome, Sampling
from shared.config.tree import Config
from shared.statistics import wilson

Form = Mapping[str, Any]

ONE_LINE = "Solve the problem step by step. End with a line that holds #### and the answer alone."
SHORT = (
    "Solve the problem. Write one short line for each calculation, nothing else. The last line is #### and the answer."
)
FORMS: Mapping[str, Mapping[str, Form]] = {
    "arithmetic": {
        "word problems": {"tasks.levels": "[1]", "rollout.max_new_tokens": 64},
        "word problems, instruction": {
            "tasks.levels": "[1]",
            "tasks.system_prompt": ONE_LINE,
            "rollout.max_new_tokens": 64,
        },
        "word problems, 3 examples": {"tasks.levels": "[1]", "tasks.few_shot": 3, "rollout.max_new_tokens": 32},
        "lists of numbers": {"tasks.source": "numbers", "rollout.max_new_tokens": 64},
        "lists of numbers, 3 examples": {
            "tasks.source": "numbers",
            "tasks.few_shot": 3,
            "rollout.max_new_tokens": 24,
        },
    },
    "gsm8k": {
        "instruction, cap 200": {"tasks.system_prompt": ONE_LINE, "rollout.max_new_tokens": 200},
        "short form, cap 160": {"tasks.system_prompt": SHORT, "rollout.max_new_tokens": 160},
        "2 examples, cap 160": {"tasks.few_shot": 2, "rollout.max_new_tokens": 160},
        "4 examples, cap 160": {"tasks.few_shot": 4, "rollout.max_new_tokens": 160},
        "2 examples, short form, cap 160": {
            "tasks.few_shot": 2,
            "tasks.system_prompt": SHORT,
            "rollout.max_new_tokens": 160,
        },
        "2 examples, short form, temperature 0.7": {
            "tasks.few_shot": 2,
            "tasks.system_prompt": SHORT,
            "rollout.max_new_tokens": 160,
            "rollout.temperature": 0.7,
        },
        "2 examples, short form, temperature 0.5": {
            "tasks.few_shot": 2,
            "tasks.system_prompt": SHORT,
            "rollout.max_new_tokens": 160,
            "rollout.temperature": 0.5,
        },
        "4 examples, temperature 0.5": {
            "tasks.few_shot": 4,
            "rollout.max_new_tokens": 160,
            "rollout.temperature": 0.5,
        },
        "4 examples, short form, temperature 0.7, cap 200": {
            "tasks.few_shot": 4,
            "tasks.system_prompt": SHORT,
            "rollout.max_new_tokens": 200,
            "rollout.temperature": 0.7,
        },
        "4 examples, short form, temperature 0.4, cap 200": {
            "tasks.few_shot": 4,
            "tasks.system_prompt": SHORT,
            "rollout.max_new_tokens": 200,
            "rollout.temperature": 0.4,
        },
    },
}


def main() -> None:
    """Measure each form, print the table, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("forms", choices=FORMS)
    parser.add_argument("model", type=Path, help="a folder in Hugging Face format")
    parser.add_argument("--weights", default="4-bit GGUF, dequantised", help="what the weights of the folder are")
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--only", nargs="+", help="names of forms (default: all)")
    parser.add_argument("--set", action="append", default=[], help="one more key of the configuration, as in `run`")
    args = parser.parse_args()
    forms = {name: form for name, form in FORMS[args.forms].items() if not args.only or name in args.only}
    config = configured({}, args)
    found: dict[str, Any] = {}
    with local_actor(config) as actor:
        adapter = policy_message(0, first_adapter(config.model, config.lora, config.run.seed))
        filler = LocalFiller(actor.rollout)
        filler.publish(adapter, oldest_needed=0)
        for name, form in forms.items():
            found[name] = measured(configured(form, args), actor, filler, args.problems, args.samples)
            print(name, json.dumps(found[name]), flush=True)
    about = {"model": args.model.name, "weights": args.weights, "set": args.set}
    print(write_result(f"prompt_forms_{args.forms}", about | {"samples": args.samples, "forms": found}))


def configured(form: Form, args: argparse.Namespace) -> Config:
    """The embedded preset's defaults, with the model, the form and the keys of the command line."""
    keys = {"model.path": args.model, "verifier.strict": "false", "tasks.max_prompt_tokens": 2000, **form}
    return load_config("embedded", [*(f"{key}={value}" for key, value in keys.items()), *args.set])


def measured(config: Config, actor: LocalActor, filler: LocalFiller, problems: int, samples: int) -> dict[str, Any]:
    """The first training problems, each answered some times."""
    tasks = load_tasks(config.tasks, actor.prompter, config.verifier.kind).train[:problems]
    orders = build_orders(
        tasks,
        seed=0,
        lane="forms",
        step=0,
        first_slot=0,
        samples=samples,
        version=0,
        sampling=Sampling(temperature=config.rollout.temperature, max_new_tokens=config.rollout.max_new_tokens),
        groups_per_order=max(1, 48 // samples),
    )
    start = time.monotonic()
    filler.submit(orders)
    groups = flat(filler.collect([order.order_id for order in orders]))
    example = actor.prompter.text(groups[0].completion_ids[: groups[0].lengths[0]].tolist())
    return figures(groups) | {"seconds": round(time.monotonic() - start, 1), "example": example}


def figures(groups: list[Group]) -> dict[str, Any]:
    """Shares of the answers, and of the groups that have both right and wrong ones."""
    right = [[outcome is Outcome.CORRECT for outcome in group.outcomes] for group in groups]
    answers = [one for group in right for one in group]
    finishes = [finish for group in groups for finish in group.finishes]
    low, high = wilson(sum(answers), len(answers))
    return {
        "problems": len(groups),
        "answers": len(answers),
        "right": round(fmean(answers), 3),
        "low": round(low, 3),
        "high": round(high, 3),
        "mixed_groups": round(fmean(any(group) and not all(group) for group in right), 3),
        "cut_off": round(fmean(finish is Finish.LENGTH for finish in finishes), 3),
        "tokens": round(fmean(length for group in groups for length in group.lengths), 1),
        "prompt_tokens": round(fmean(len(group.prompt_ids) for group in groups), 1),
    }


if __name__ == "__main__":
    main()
