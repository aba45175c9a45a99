"""What a FilledOrder must satisfy beyond its types, and that the fault is named with group and completion."""

from typing import Any

import numpy as np
import pytest

from protocol.errors import MalformedMessage
from protocol.messages import Finish, Outcome
from protocol.validate import check_groups
from tests.support.wire_examples import filled_order, group


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def marks(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"entropies": None},
        {"logprobs": floats(-80.0, 0.0, 0.001)},
        {"prompt_ids": ids()},
        {"trained": marks(1, 1, 1)},
        {"trained": marks(0, 1, 1), "logprobs": floats(0, -1, -1), "entropies": floats(0, 1, 1)},
        {"trained": marks(0, 1, 1), "logprobs": floats(0, -1, -1), "entropies": None},
        {"lengths": (0, 0, 0), "completion_ids": ids(), "logprobs": floats(), "entropies": floats()},
    ],
)
def test_consistent_groups(changes: dict[str, Any]) -> None:
    check_groups(filled_order(group(), group(**changes)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lengths": (2, 0, 2)}, "4 tokens in completions 0 to 2 but 3 completion_ids"),
        ({"lengths": (2, 0)}, "2 completions but 3 finishes"),
        ({"completion_ids": ids(1, 2)}, "3 tokens in completions 0 to 2 but 2 completion_ids"),
        ({"logprobs": floats(-1.0)}, "but 1 logprobs"),
        ({"entropies": floats()}, "but 0 entropies"),
        ({"trained": marks(1, 1)}, "but 2 trained"),
        ({"trained": marks(1, 2, 1)}, r"completion 0 has a value in trained that is neither 0 nor 1 \(token 1"),
        ({"trained": marks(1, 1, 0)}, "completion 2 has a last token that was not sampled"),
        ({"trained": marks(0, 1, 1)}, "completion 0 has a log-prob for a token that was not sampled"),
        (
            {"trained": marks(0, 1, 1), "logprobs": floats(0, -1, -1)},
            "completion 0 has an entropy for a token that was",
        ),
        ({"extras": {"read": ("18", "")}}, "3 completions but 2 extras 'read'"),
        ({"votes": (0, 1)}, "3 completions but 2 votes"),
        ({"teacher": floats(-1, -1)}, "but 2 teacher"),
        ({"teacher": floats(-1, -1, np.nan)}, "completion 2 has a value that is not finite in teacher"),
        ({"teacher": floats(-1, 0.0011, -1)}, "completion 0 has a teacher's log-prob above 0.001"),
        ({"teacher": floats(-1, -1, -1001)}, "completion 2 has a teacher's log-prob below -1000"),
        (
            {"trained": marks(0, 1, 1), "logprobs": floats(0, -1, -1), "teacher": floats(-1, -1, -1)},
            "completion 0 has a teacher's log-prob for a token that was not sampled",
        ),
        ({"finishes": (Finish.STOP,)}, "3 completions but 1 finishes"),
        ({"outcomes": (Outcome.WRONG,) * 4}, "3 completions but 4 outcomes"),
        ({"scores": (1.0, 1.0)}, "3 completions but 2 scores"),
        ({"prompt_ids": ids(3, -1)}, "negative token id in its prompt"),
        ({"completion_ids": ids(5, -6, 9)}, r"completion 0 has a negative token id \(token 1 of the group\)"),
        ({"completion_ids": ids(5, 6, -9)}, r"completion 2 has a negative token id \(token 2 of the group\)"),
        ({"logprobs": floats(-1, np.nan, -1)}, "completion 0 has a value that is not finite in logprobs"),
        ({"logprobs": floats(-1, -1, -np.inf)}, "completion 2 has a value that is not finite in logprobs"),
        ({"entropies": floats(1, 1, np.inf)}, "completion 2 has a value that is not finite in entropies"),
        ({"entropies": floats(1, np.nan, 1)}, "completion 0 has a value that is not finite in entropies"),
        ({"logprobs": floats(np.inf, -1, -1)}, "completion 0 has a value that is not finite in logprobs"),
        ({"logprobs": floats(-1, -1, 0.0011)}, "completion 2 has a log-prob above 0.001"),
        ({"logprobs": floats(-1, -1001, -1)}, "completion 0 has a log-prob below -1000"),
        ({"entropies": floats(1, 1, 22.1)}, "completion 2 has an entropy above 22"),
        ({"entropies": floats(1, -0.01, 1)}, "completion 0 has a negative entropy"),
    ],
)
def test_inconsistent_groups(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(MalformedMessage, match=rf"^Group train/000012/009.*{said}"):
        check_groups(filled_order(group(), group(group_id="train/000012/009", **changes)))
