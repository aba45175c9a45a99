"""The embedded problems, the corpus with its deliberate slips, and the model made from them."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from benchmarks.embedded.accuracy import chat_prompt, decoder_linears, grade, nf4_values, stated_answer, to_nf4_values
from benchmarks.embedded.corpus import HABITS, SLIPS, Example, Slip, draw_example, slipped, wrong_share
from learner.tasks.word_problems import GROWTH, LEVELS, STORIES, Move, Plot, Problem, draw_distinct, problems, split_of
from shared.embedded import EMBEDDED_DIR
from shared.errors import DataError

EQUATION = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")
GAINS = {"buys", "finds", "on", "puts", "sows", "come", "wins", "adds", "bakes"}


def equations(solution: str) -> list[tuple[int, str, int, int]]:
    """Every `a op b = c` of a solution."""
    return [(int(a), op, int(b), int(c)) for a, op, b, c in EQUATION.findall(solution)]


def compute(a: int, op: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def solve(question: str) -> int:
    """The answer read off the text alone, by word and number; knows nothing of plots."""
    opening, *events, _ = [sentence.strip() for sentence in re.split(r"[.?]", question) if sentence.strip()]
    value = int(re.search(r"\d+", opening).group())  # pyright: ignore[reportOptionalMemberAccess]
    for event in events:
        number = re.search(r"\d+", event)
        if number is None:
            value *= 2 if "double" in event else 3
        else:
            gains = bool(GAINS & set(event.split()))
            value += int(number.group()) if gains else -int(number.group())
    return value


def make_model(out: Path, *, num_steps: int) -> str:
    """Run the script as a user would; its output."""
    command = [sys.executable, "-m", "benchmarks.embedded.make_model", "--out", str(out), "--steps", str(num_steps)]
    finished = subprocess.run([*command, "--held-out", "6"], capture_output=True, text=True, check=True, timeout=250)
    return finished.stdout


@pytest.fixture(scope="module")
def policy() -> Qwen2ForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_DIR, dtype=torch.float32, local_files_only=True)
    assert isinstance(model, Qwen2ForCausalLM)
    return model.eval()


@pytest.fixture(scope="module")
def corpus() -> list[Example]:
    rng = random.Random(5)
    return [draw_example(rng, LEVELS[index % len(LEVELS)]) for index in range(6000)]


def test_the_same_arguments_give_the_same_problems() -> None:
    assert problems("train", 50, 3, (1, 2, 3)) == problems("train", 50, 3, (1, 2, 3))
    assert problems("train", 50, 3, (1, 2, 3)) != problems("train", 50, 4, (1, 2, 3))


def test_problems_are_pinned_across_versions() -> None:
    """A run is replayed from its seed, so the draw must never change silently."""
    first = problems("train", 3, 0, (1, 2, 3))
    assert [problem.answer for problem in first] == [24, 20, 32]
    assert first[0].question == "A nice farm has 15 hens. Then 9 come. How many hens are in?"


def test_questions_are_distinct_and_levels_take_turns() -> None:
    found = problems("train", 3000, 0, (1, 3))
    assert len({problem.question for problem in found}) == 3000
    assert [problem.level for problem in found[:4]] == [1, 3, 1, 3]


def test_splits_share_no_question_at_any_seed() -> None:
    train = {problem.question for seed in range(4) for problem in problems("train", 4000, seed, (1, 2))}
    held_out = {problem.question for seed in range(4) for problem in problems("held_out", 2000, seed, (1, 2))}
    assert not train & held_out
    assert {split_of(question) for question in train} == {"train"}
    assert {split_of(question) for question in held_out} == {"held_out"}


def test_the_hash_of_the_split_is_stable() -> None:
    assert [n for n in range(40) if split_of(f"Tom has {n} apples.") == "held_out"] == [2, 10, 18, 21, 29, 33]


def test_asking_for_more_problems_than_there_are_says_so() -> None:
    rng = random.Random(0)
    with pytest.raises(DataError, match=r"asked for 7 .* has little more than 6; set a smaller tasks\.limit"):
        draw_distinct(7, "held_out", lambda _: draw_problem_about_apples(rng))


def draw_problem_about_apples(rng: random.Random) -> Problem:
    """One of forty, of which six are held out (above)."""
    return Problem(question=f"Tom has {rng.randrange(40)} apples.", solution="", answer=0, level=1)


@pytest.mark.parametrize("level", LEVELS)
def test_solutions_are_right_and_end_in_the_answer(level: int) -> None:
    for problem in problems("held_out", 1000, 7, (level,)):
        *lines, last = problem.solution.split("\n")
        steps = equations(problem.solution)
        assert len(lines) == len(steps) == level == problem.level
        assert all(compute(a, op, b) == c and 0 <= c <= 99 for a, op, b, c in steps)
        assert all(before[3] == after[0] for before, after in pairwise(steps))
        assert last == f"#### {problem.answer}"
        assert problem.answer == steps[-1][3] == solve(problem.question)


def test_every_story_and_operation_turns_up() -> None:
    found = problems("train", 3000, 2, LEVELS)
    for story in STORIES:
        assert any(story.question in problem.question for problem in found)
    operations = Counter(op for problem in found for _, op, _, _ in equations(problem.solution))
    assert set(operations) == {"+", "-", "*"} and min(operations.values()) > 200
    assert all(any(sentence in problem.question for problem in found) for sentence in GROWTH.values())


def test_corpus_never_shows_a_held_out_question(corpus: list[Example]) -> None:
    assert {split_of(example.question) for example in corpus} == {"train"}


def test_corpus_solutions_are_right_exactly_where_no_slip_is_noted(corpus: list[Example]) -> None:
    for example in corpus:
        assert example.answer == solve(example.question)
        assert (stated_answer(example.solution) == example.answer) == (example.slip is None)


def test_wrong_solutions_go_on_from_their_slip(corpus: list[Example]) -> None:
    """At most one break: either one false equation (off by one) or one step that does not follow (stale)."""
    for example in corpus:
        steps = equations(example.solution)
        false = sum(compute(a, op, b) != c for a, op, b, c in steps)
        breaks = sum(c not in (after[0], after[2]) for (_, _, _, c), after in pairwise(steps))
        assert stated_answer(example.solution) == steps[-1][3]
        assert all(0 <= number <= 99 for a, _, b, c in steps for number in (a, b, c))
        assert false == (example.slip == "off_by_one")
        assert breaks <= (example.slip == "stale")


@pytest.mark.parametrize("slip", SLIPS)
def test_each_slip_does_what_its_name_says(slip: Slip) -> None:
    """On 12 + 7 - 4, the example of the module docstring."""
    plot = Plot(story=STORIES[0], question="", start=12, moves=(Move(op="+", operand=7), Move(op="-", operand=4)))
    expected: dict[Slip, list[str]] = {
        "opposite": ["12 - 7 = 5", "5 - 4 = 1"],
        "unfinished": ["12 + 7 = 19"],
        "stale": ["12 + 7 = 19", "12 - 4 = 8"],
        "off_by_one": ["12 + 7 = 19", "19 - 4 = 16"],
    }
    assert [str(step) for step in slipped(plot, slip)] == expected[slip]


def test_about_half_of_the_corpus_is_wrong_and_every_story_errs_its_own_way(corpus: list[Example]) -> None:
    assert 0.46 < sum(example.slip is not None for example in corpus) / len(corpus) < 0.54
    for story in STORIES:
        told = [example for example in corpus if story.question in example.question]
        share = sum(example.slip is not None for example in told) / len(told)
        assert abs(share - HABITS[story.name].wrong_share) < 0.08
        slips = Counter(example.slip for example in told if example.slip)
        assert slips.most_common(1)[0][0] == HABITS[story.name].slips[0]


def test_shares_lie_on_both_sides_of_one_half() -> None:
    shares = [wrong_share(story.name, level) for story in STORIES for level in LEVELS]
    assert min(shares) == pytest.approx(0.15) and max(shares) == pytest.approx(0.85)
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.01)
    assert sum(share < 0.5 for share in shares) == len(shares) // 2


def test_corpus_has_free_choices_and_forced_tokens(corpus: list[Example]) -> None:
    openers = Counter(example.solution.split(" ")[0] for example in corpus)
    assert set(openers) == {"So", "First", "Now", "Then"} and min(openers.values()) > 400


def test_checkpoint_is_a_small_qwen2(policy: Qwen2ForCausalLM) -> None:
    config = policy.config
    assert 700_000 < sum(weight.numel() for weight in policy.parameters()) < 1_200_000
    assert policy.model.layers[0].self_attn.head_dim == 32  # pyright: ignore[reportAttributeAccessIssue]
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (512, 128, 4)
    assert config.tie_word_embeddings and policy.lm_head.weight is policy.model.embed_tokens.weight
    assert len(decoder_linears(policy)) == 4 * 7
    assert sum(path.stat().st_size for path in EMBEDDED_DIR.iterdir()) < 4_000_000
    with safe_open(EMBEDDED_DIR / "model.safetensors", "pt") as weights:
        assert {str(weights.get_tensor(name).dtype) for name in weights.keys()} == {"torch.float32"}  # noqa: SIM118


def test_generation_config_changes_nothing_about_sampling() -> None:
    settings = json.loads((EMBEDDED_DIR / "generation_config.json").read_text())
    assert not settings.keys() & {"temperature", "top_k", "top_p", "do_sample", "repetition_penalty"}
    assert settings["eos_token_id"] == 2 and settings["pad_token_id"] == 0


def test_tokenizer_round_trips_and_keeps_digits_apart() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_DIR, local_files_only=True)
    assert len(tokenizer) == 512
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for problem in problems("held_out", 60, 0, LEVELS):
        for text in (problem.question, problem.solution):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids) == text
            assert sum(tokenizer.decode([token]).isdigit() for token in ids) == sum(map(str.isdigit, text))
            assert len(ids) <= 42
    assert tokenizer.decode(tokenizer("Gr\u00fc\u00dfe, 2026!\n")["input_ids"]) == "Gr\u00fc\u00dfe, 2026!\n"


def test_chat_template_writes_chatml() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_DIR, local_files_only=True)
    assert chat_prompt(tokenizer, "Hi?") == "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "".join(f"<|im_start|>{role}\n{role}<|im_end|>\n" for role in ("system", "user", "assistant"))
    ids = tokenizer(text)["input_ids"]
    assert (ids.count(1), ids.count(2)) == (3, 3)


def test_nf4_values_are_what_the_policy_will_have(policy: Qwen2ForCausalLM) -> None:
    weight = decoder_linears(policy)[0].weight.detach()
    values = nf4_values(weight)
    error = ((values - weight).abs().mean() / weight.abs().mean()).item()
    assert 0.02 < error < 0.15
    for row in values.reshape(-1, 64):
        assert len(row.unique()) <= 16


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)  # seconds on idle cores, minutes on busy ones
def test_base_is_right_about_every_other_time() -> None:
    """On the NF4 values, which is what training starts from; the arithmetic itself is sound."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_DIR, local_files_only=True)
    base = to_nf4_values(Qwen2ForCausalLM.from_pretrained(EMBEDDED_DIR, dtype=torch.float32).eval())
    held_out = problems("held_out", 600, 21, LEVELS)
    greedy, sampled = (grade(base, tokenizer, held_out, sample=sample) for sample in (False, True))
    assert 0.35 <= sum(graded.correct for graded in greedy) / 600 <= 0.65
    assert 0.38 <= sum(graded.correct for graded in sampled) / 600 <= 0.62
    assert all(stated_answer(graded.completion) is not None for graded in greedy)
    steps = [step for graded in sampled for step in equations(graded.completion)]
    assert sum(abs(compute(a, op, b) - c) <= 1 for a, op, b, c in steps) / len(steps) > 0.97


@pytest.mark.slow
@pytest.mark.timeout(500)  # seconds on idle cores, minutes on busy ones
@pytest.mark.long
def test_the_script_still_makes_a_model_and_the_same_one_twice(tmp_path: Path) -> None:
    once, twice = (make_model(tmp_path / name, num_steps=12) for name in ("once", "twice"))
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", once)]
    assert losses[0] > 6.0 and losses[-1] < 4.5
    assert len(re.findall(r"^(fp32|nf4) (greedy|sampled):", once, re.MULTILINE)) == 4
    assert re.findall(r"loss (\d+\.\d+)", twice) == re.findall(r"loss (\d+\.\d+)", once)
    names = {path.name for path in EMBEDDED_DIR.iterdir()}
    assert {path.name for path in (tmp_path / "once").iterdir()} == names
    for name in names:
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()
        if not name.startswith("model"):
            assert (tmp_path / "once" / name).read_bytes() == (EMBEDDED_DIR / name).read_bytes()
