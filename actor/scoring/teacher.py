"""Asks a teacher behind a URL how likely each sampled token is (loss.kind = "opd" with teacher.url).

    POST {url}/completions   model, prompt = [[ids of prompt and completion], ...], max_tokens = 1, echo, logprobs = 1
    choices[i]               logprobs.token_logprobs = [None, log p(second | first), ...], one for each token sent

This is OpenAI's original completions API, as vLLM and other servers implement it. Token ids go there and log-probs at
temperature 1 come back; no text is tokenised again.

    same tokens   before the first order, ids from all over the vocabulary are sent, and the server's spelling of each
                  must be ours. Every reply must have as many tokens as were sent
    down          a request without a connection or a reply in teacher.limit_s, or refused as too many or by a fault of
                  the server (408, 425, 429, 5xx), is repeated. The actor waits and sends heartbeats. After
                  teacher.patience_s without any reply the run ends with one sentence
    recorded      what the teacher said travels with the group and is in the journal before the order is acknowledged,
                  so an order is asked for once, and a resumed or replayed run asks for nothing that it has

Left out on purpose: other prompts than the policy's, and top-k distributions, since the gradient needs the sampled
tokens only.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from msgspec import structs

from actor.engines.server.completions import Choice, Completions, NoReply, Rejected, Spelling, plain_words
from protocol.limits import MIN_LOGPROB
from protocol.messages import Group
from shared.config.training import TeacherConfig
from shared.errors import ConfigError, UserError

Beat = Callable[[str], None]
AskTeacher = Callable[[tuple[Group, ...], Beat], tuple[Group, ...]]
"""The same groups with the teacher's log-probs."""

AT_ONCE = 8
"""Requests, one for each group. Servers put them together."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
BEAT_EVERY_S = 0.2
WAITING = "waiting for the teacher"

log = logging.getLogger("actor")


def no_teacher(groups: tuple[Group, ...], beat: Beat) -> tuple[Group, ...]:
    raise ConfigError(
        "The learner wants a teacher to be asked, but there is no teacher.url here; copy the run's config.json."
    )


class RemoteTeacher:
    """One server."""

    def __init__(self, config: TeacherConfig, spelling: Spelling, vocabulary: int) -> None:
        """vocabulary: number of tokens."""
        self.config = config
        self.name = f"The teacher at {config.url}"
        self.server = Completions(self.name, config.url, config.key_variable, config.limit_s)
        self.spelling = spelling
        self.vocabulary = vocabulary
        self.is_checked = False
        self.threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="teacher")

    def read(self, groups: tuple[Group, ...], beat: Beat) -> tuple[Group, ...]:
        """An AskTeacher."""
        if not self.is_checked:
            self.check_tokens(beat)
            self.is_checked = True
        replies = self.ask_all([texts_of(group) for group in groups], beat)
        return tuple(self.with_logprobs(group, reply) for group, reply in zip(groups, replies, strict=True))

    def with_logprobs(self, group: Group, choices: Sequence[Choice]) -> Group:
        rows: list[np.ndarray] = []
        for ids, choice in zip(texts_of(group), choices, strict=True):
            found = self.server.logprobs_of(choice, len(ids))[len(group.prompt_ids) :]
            if None in found:
                raise UserError(f"{self.name} gave no log-prob for some tokens; is it a server with echo and logprobs?")
            rows.append(np.array(found, np.float32))
        teacher = np.clip(np.concatenate(rows), MIN_LOGPROB, 0.0)
        if group.trained is not None:
            teacher[group.trained == 0] = 0.0
        return structs.replace(group, teacher=teacher.astype(np.float32))

    def check_tokens(self, beat: Beat) -> None:
        """ConfigError unless server and run have the same tokens."""
        ids = plain_words(self.spelling, self.vocabulary)
        ((choice,),) = self.ask_all([[ids]], beat)
        remedy = "take a teacher of the same family, whose tokenizer is the same."
        self.server.check_tokens(choice, ids, self.spelling, remedy)

    # --- requests

    def ask_all(self, asked: Sequence[Sequence[list[int]]], beat: Beat) -> list[list[Choice]]:
        """The choices of each request, in order. What has no reply is asked again until patience ends."""
        replies: dict[int, list[Choice]] = {}
        heard_at, pause = time.monotonic(), FIRST_PAUSE_S
        while True:
            missing = [place for place in range(len(asked)) if place not in replies]
            why = self.try_once({place: asked[place] for place in missing}, replies, beat)
            if not why:
                return [replies[place] for place in range(len(asked))]
            now = time.monotonic()
            if len(replies) > len(asked) - len(missing):
                heard_at, pause = now, FIRST_PAUSE_S
            if now - heard_at > self.config.patience_s:
                raise UserError(
                    f"{self.name} has not replied for {now - heard_at:.0f} s ({why}); start it again, then use"
                    " `resume`: nothing is lost."
                )
            log.warning("%s does not reply (%s); asks again in %.0f s", self.name, why, pause)
            self.rest(pause, beat)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def try_once(self, asked: Mapping[int, Sequence[list[int]]], replies: dict[int, list[Choice]], beat: Beat) -> str:
        """Adds to the replies; returns why one is missing, empty if none is."""
        futures = {place: self.threads.submit(self.post, texts) for place, texts in asked.items()}
        try:
            await_all(futures.values(), beat)
        finally:
            for future in futures.values():
                future.cancel()
        why = ""
        for place, future in futures.items():
            try:
                replies[place] = future.result()
            except NoReply as error:
                why = str(error)
        return why

    def rest(self, seconds: float, beat: Beat) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            beat(WAITING)
            time.sleep(min(BEAT_EVERY_S, seconds))

    def post(self, texts: Sequence[list[int]]) -> list[Choice]:
        """The choices of one request, in the order of its texts."""
        try:
            return self.server.texts(texts, self.config.model)
        except Rejected as error:
            raise ConfigError(f"{self.name} refused a request ({error}); check teacher.model.") from error

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)


def await_all(futures: Iterable[Future[Any]], beat: Beat) -> None:
    running = set(futures)
    while running:
        beat(WAITING)
        _, running = wait(running, timeout=BEAT_EVERY_S)


def texts_of(group: Group) -> list[list[int]]:
    """Prompt and completion, as ids, for each completion."""
    prompt, ends = group.prompt_ids.tolist(), np.cumsum(group.lengths)[:-1]
    return [prompt + ids.tolist() for ids in np.split(group.completion_ids, ends)]
