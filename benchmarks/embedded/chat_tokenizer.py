"""Trains the embedded model's tokenizer: byte-level BPE of 512 entries, ChatML, every digit a token of its own.

It is a Qwen2 tokenizer with merges of its own. That keeps Qwen's way of cutting text before merging, digits one by one
(arithmetic is learned on digits), because loaders always build a Qwen2 tokenizer for a Qwen2 model.
The full byte alphabet stays in, so any text a user types can be encoded, only less tightly. No system prompt is added.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from benchmarks.embedded.corpus import draw_example
from learner.tasks.word_problems import LEVELS

VOCAB_SIZE = 512
MAX_LENGTH = 512
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, TURN_END_ID = 0, 2  # the trainer gives special tokens the first ids, in the order it gets them

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_NUM_TEXTS = 6000
EVERYDAY_WORDS = (
    "the of and to in is you that it was for on are as with they at be this have from or one had by but not what all "
    "were we when your can said there use an each which do how their if will up other about out many them these so"
)


def train_tokenizer(seed: int) -> Qwen2Tokenizer:
    return made_tokenizer(_texts(seed), CHAT_TEMPLATE, [])


def made_tokenizer(texts: Iterator[str], template: str, marks: list[str]) -> Qwen2Tokenizer:
    """marks: more special tokens."""
    qwen = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = qwen.normalizer
    tokenizer.pre_tokenizer = qwen.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, TURN_START, TURN_END, *marks],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    merges: Any = [tuple(pair) for pair in learned["merges"]]  # the declared type, list[str], is refused at run time
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=merges,
        unk_token=PAD,
        pad_token=PAD,
        eos_token=TURN_END,
        extra_special_tokens=[TURN_START, *marks],
        chat_template=template,
        model_max_length=MAX_LENGTH,
    )


def _texts(seed: int) -> Iterator[str]:
    """Corpus texts, the three role names of the chat template, and everyday words to fill up the vocabulary."""
    yield EVERYDAY_WORDS
    rng = random.Random(seed)
    for index in range(_NUM_TEXTS):
        example = draw_example(rng, LEVELS[index % len(LEVELS)])
        yield from (example.question, example.solution, "system", "user", "assistant")
