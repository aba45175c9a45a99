# ruff: noqa: B905
"""Ten reward functions in the forms that public GRPO notebooks and TRL's own rewards use. Written for GRPOTrainer.

They are called as they are: by hand with TRL's arguments, and by our scoring workers.
"""

import ast
import asyncio
import operator
import re

XML = re.compile(r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"<answer>.*?([\d\.,]+)", re.DOTALL)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
PRINTED = 0


def inside(text):
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


# 1: the question of the last message, and the gold answer, printed for the first of the batch
def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    question = prompts[0][-1]["content"]
    extracted = [inside(text) for text in responses]
    print("-" * 20, f"Question:\n{question}", f"\nAnswer:\n{answer[0]}", f"\nResponse:\n{responses[0]}")
    return [2.0 if text == gold else 0.0 for text, gold in zip(extracted, answer)]


# 2: a digit
def int_reward_func(completions, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    return [0.5 if inside(text).isdigit() else 0.0 for text in responses]


# 3: a whole form as a pattern
def strict_format_reward_func(completions, **kwargs) -> list[float]:
    matches = [XML.match(completion[0]["content"]) for completion in completions]
    return [0.5 if match else 0.0 for match in matches]


# 4: parts of a form counted, what follows punished
def xmlcount_reward_func(completions, **kwargs) -> list[float]:
    def count(text):
        score = 0.125 * sum(text.count(tag) == 1 for tag in ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n"))
        if text.count("\n</answer>") == 1:
            score += 0.125 - 0.001 * max(0, len(text.split("\n</answer>")[-1]) - 1)
        return score

    return [count(completion[0]["content"]) for completion in completions]


# 5: a number near the gold one, with None for what cannot be compared, and a counter in the module
def check_numbers(prompts, completions, answer, **kwargs):
    global PRINTED
    scores = []
    for completion, true_answer in zip(completions, answer):
        found = NUMBER.search(completion[0]["content"])
        if found is None:
            scores.append(-2.5)
            continue
        try:
            guess, gold = float(found.group(1).replace(",", "")), float(true_answer.strip())
            scores.append(3.5 if guess == gold else 1.5 if 0.9 <= guess / gold <= 1.1 else -1.5)
        except (ValueError, ZeroDivisionError):
            scores.append(None)
    PRINTED += 1
    return scores


# 6: Countdown, whose columns are a number and a list of numbers
def equation_reward_func(completions, target, nums, **kwargs):
    rewards = []
    for completion, goal, numbers in zip(completions, target, nums):
        match = ANSWER.search("<answer>" + completion[0]["content"].split("<answer>")[-1])
        equation = match.group(1).strip() if match else ""
        used = [int(number) for number in re.findall(r"\d+", equation)]
        if sorted(used) != sorted(numbers) or not re.fullmatch(r"[\d+\-*/().\s]+", equation):
            rewards.append(0.0)
            continue
        try:
            rewards.append(1.0 if abs(value_of(ast.parse(equation, mode="eval").body) - float(goal)) < 1e-5 else 0.0)
        except (SyntaxError, ZeroDivisionError, KeyError):
            rewards.append(0.0)
    return rewards


def value_of(node):
    """The notebooks use eval here, which this repository forbids."""
    if isinstance(node, ast.Constant):
        return float(str(node.value))
    return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))


# 7: TRL's accuracy_reward in small: log_extra, log_metric, None where there is no gold answer
def accuracy_reward(completions, solution, log_extra=None, log_metric=None, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    golds = [found[-1] if (found := re.findall(r"####\s*(\S+)", text)) else None for text in solution]
    read = [inside(content) for content in contents]
    rewards = [None if gold is None else float(gold == text) for gold, text in zip(golds, read)]
    if log_extra:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [gold or "[failed]" for gold in golds])
    known = [reward for reward in rewards if reward is not None]
    if log_metric and known:
        log_metric("accuracy", sum(known) / len(known))
    return rewards


# 8: asynchronous, each completion on its own
async def async_reward_func(prompts, completions, **kwargs):
    async def score(prompt, completion):
        await asyncio.sleep(0.001)
        return len(set(prompt[-1]["content"].split()) & set(completion[0]["content"].split())) / 10

    return await asyncio.gather(*[score(*pair) for pair in zip(prompts, completions)])


# 9: a weight that grows over the run
def scheduled_brevity(completions, completion_ids, trainer_state, **kwargs):
    progress = trainer_state.global_step / trainer_state.max_steps
    return [-progress * len(ids) / 100 for ids in completion_ids]


# 10: a function that a function makes
def get_repetition_penalty_reward(ngram_size, max_penalty):
    def repetition_penalty_reward(completions, **kwargs):
        rewards = []
        for completion in completions:
            words = completion[0]["content"].lower().split()
            grams = list(zip(*[words[start:] for start in range(ngram_size)]))
            rewards.append((1 - len(set(grams)) / len(grams)) * max_penalty if grams else 0.0)
        return rewards

    return repetition_penalty_reward


repetition_penalty_reward = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
