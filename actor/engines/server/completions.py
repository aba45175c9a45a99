"""Requests to OpenAI's original completions API, as vLLM and other servers implement it.

    POST {url}/completions   model, prompt = [[ids of a text], ...], max_tokens = 1, echo, logprobs = 1
    choices[i]               logprobs.token_logprobs = [None, log p(second | first), ...], one for each token sent

That is how likely each token of a text is at temperature 1: token ids go there and numbers come back, and no text is
tokenised again. `get`, `post` and `tell` are for all else that a server knows.

    NoReply   no connection, no whole reply within the limit, too many requests, or a fault of the server: 408, 425,
              429, 5xx. Another try may have a reply
    Rejected  every other status: the request, the key or the server's options are wrong
    tokens    ids of plain words from all over the vocabulary are sent, and the server's spelling of each must be ours

The caller decides how long to try, and tells its user what to do. Left out on purpose: connections that stay open,
since a completion takes longer than a connection, and a server that was restarted has none of them.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from typing import Any

from protocol.plain_text import for_log
from shared.errors import ConfigError, in_words

Choice = Mapping[str, Any]
"""One of a reply's `choices`."""
Spelling = Callable[[int], str]
"""Of a token, as text."""

PROBES = 64
LETTERS = 2
"""A probed token has at least so many, and nothing else but spaces, so that every server spells it alike."""
QUICK_S = 20.0
"""For what is not computed, so that an address which swallows requests is noticed soon."""
MAX_REPLY_BYTES = 256 * 2**20
TRY_AGAIN = (408, 425, 429)


class NoReply(Exception):
    """Another try may have one."""


class Rejected(Exception):
    """Another try would be answered the same."""

    def __init__(self, status: int, reason: str, said: str) -> None:
        super().__init__(f"{status} {reason}: {said}")
        self.status = status
        self.said = said


class Completions:
    """One server."""

    def __init__(self, name: str, url: str, key_variable: str, limit_s: float) -> None:
        """name: for sentences. key_variable: of the environment, with the server's key."""
        self.name = name
        self.url = url.rstrip("/")
        self.key_variable = key_variable
        self.limit_s = limit_s

    def texts(self, texts: Sequence[Sequence[int]], model: str) -> list[Choice]:
        """The choices of one request, in the order of its texts. model: empty for the server's own."""
        body = {"prompt": list(map(list, texts)), "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1}
        return self.choices(body | ({"model": model} if model else {}), len(texts))

    def choices(self, body: Mapping[str, Any], count: int) -> list[Choice]:
        """So many must come back."""
        reply = self.post("/completions", body)
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list) or len(choices) != count:
            raise ConfigError(f"{self.name} did not reply like a completions server: {for_log(str(reply))}")
        return sorted(choices, key=lambda choice: choice.get("index", 0))

    def logprobs_of(self, choice: Choice, count: int) -> list[float | None]:
        """Of the tokens that were sent; the one that was sampled after them is left out."""
        found = (choice.get("logprobs") or {}).get("token_logprobs")
        if not isinstance(found, list):
            raise ConfigError(
                f"{self.name} replied without the log-probs of the prompt; its completions must support echo and"
                " logprobs, as vLLM's do."
            )
        if len(found) not in (count, count + 1):
            raise ConfigError(
                f"{self.name} counted {len(found)} tokens where {count} were sent; it adds tokens of its own, or has"
                " another tokenizer."
            )
        return found[:count]

    def check_tokens(self, choice: Choice, ids: Sequence[int], spelling: Spelling, remedy: str) -> None:
        """ConfigError unless the server spells these tokens as we do. choice: its reply to them."""
        self.logprobs_of(choice, len(ids))
        tokens = (choice.get("logprobs") or {}).get("tokens") or []
        for token, theirs in zip(ids, map(str, tokens), strict=False):
            ours = spelling(token)
            if theirs.strip() != ours.strip() and theirs != f"token_id:{token}":
                raise ConfigError(
                    f"{self.name} has other tokens than the run: {token} is {ours!r} here and {for_log(theirs)!r}"
                    f" there; {remedy}"
                )

    def get(self, path: str) -> Any:
        return self.exchange(path, None, min(self.limit_s, QUICK_S))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self.exchange(path, json.dumps(body).encode(), self.limit_s)

    def tell(self, path: str, body: Mapping[str, Any]) -> Any:
        """As `post`, with a short limit: the server computes nothing for it."""
        return self.exchange(path, json.dumps(body).encode(), min(self.limit_s, QUICK_S))

    def exchange(self, path: str, data: bytes | None, limit_s: float) -> Any:
        """What the reply says: JSON as what it means, all else as text."""
        headers = {"Content-Type": "application/json"} if data is not None else {}
        if key := os.environ.get(self.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as response:
                text = response.read(MAX_REPLY_BYTES).decode()
                return json.loads(text) if text.startswith(("{", "[")) else text
        except urllib.error.HTTPError as error:
            raise refusal(error) from error
        except (OSError, HTTPException, ValueError) as error:
            raise NoReply(in_words(error)) from error


def refusal(error: urllib.error.HTTPError) -> NoReply | Rejected:
    """With what the server says about it."""
    with error:
        said = message_of(error.read(20_000).decode(errors="replace"))
    if error.code in TRY_AGAIN or error.code >= 500:
        return NoReply(f"{error.code} {error.reason}: {said}")
    return Rejected(error.code, error.reason, said)


def message_of(text: str) -> str:
    """The sentence in an error of OpenAI's form or FastAPI's; otherwise all of it."""
    try:
        found = json.loads(text)
    except ValueError:
        return for_log(text)
    error = (found.get("error") or found.get("detail")) if isinstance(found, dict) else None
    return for_log(str(error.get("message", error) if isinstance(error, dict) else error or text))


def plain_words(spelling: Spelling, vocabulary: int) -> list[int]:
    """Ids from all over a vocabulary of so many tokens."""
    spelled = ((token, spelling(token).strip()) for token in range(vocabulary))
    plain = [token for token, text in spelled if len(text) >= LETTERS and text.isascii() and text.isalpha()]
    return plain[:: max(1, len(plain) // PROBES)][:PROBES]
