"""Whether a FilledOrder makes sense, beyond its types: lengths that add up, values a loss can use.

    S = sum(lengths) = len(completion_ids) = len(trained) = len(logprobs) = len(entropies) = len(teacher)
    G = len(lengths) = len(finishes) = len(outcomes) = len(scores)
      = len(rewards[name]) = len(extras[name]) for each name = len(votes)
    ids >= 0, of completions also < vocabulary; log-probs and entropies finite;
    -1000 <= log-prob <= 1e-3; -1e-3 <= entropy <= 22
    trained is 0 or 1, and 1 at the end of a completion; where it is 0, log-probs and entropy are 0

Left out on purpose: whether it fits the order and the verifier (learner/orders/order_check.py).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.errors import MalformedMessage
from protocol.limits import MAX_COUNT, MAX_ENTROPY, MAX_LOGPROB, MIN_LOGPROB
from protocol.messages import FilledOrder, Group
from protocol.plain_text import for_log


def check_groups(filled_order: FilledOrder, vocabulary: int = MAX_COUNT + 1) -> None:
    """MalformedMessage for the first check that fails; it names the group and the completion. All arrays of one kind
    are looked at together, and one group after the other only where something is wrong."""
    groups = filled_order.groups
    for group in groups:
        check_lengths(group)
    if not are_usable(groups, vocabulary):
        for group in groups:
            refuse_wrong_value(group, vocabulary)


def check_lengths(group: Group) -> None:
    """One entry per completion, one number per token."""
    num_completions, num_tokens = len(group.lengths), sum(group.lengths)
    counts = {len(group.finishes), len(group.outcomes), len(group.scores)}
    counts.update(map(len, group.rewards.values()), map(len, group.extras.values()))
    if group.votes is not None:
        counts.add(len(group.votes))
    sizes = {group.completion_ids.size, group.logprobs.size}
    sizes.update(array.size for array in (group.trained, group.entropies, group.teacher) if array is not None)
    if counts != {num_completions} or sizes != {num_tokens}:
        refuse_wrong_length(group, num_completions, num_tokens)


def refuse_wrong_length(group: Group, num_completions: int, num_tokens: int) -> None:
    per_sample = {"finishes": group.finishes, "outcomes": group.outcomes, "scores": group.scores}
    per_sample |= {f"rewards '{for_log(name)}'": values for name, values in group.rewards.items()}
    per_sample |= {f"extras '{for_log(name)}'": texts for name, texts in group.extras.items()}
    per_sample |= {} if group.votes is None else {"votes": group.votes}
    for name, values in per_sample.items():
        if len(values) != num_completions:
            raise MalformedMessage(
                f"Group {group.group_id} has {num_completions} completions but {len(values)} {name}."
            )
    for name, array in token_arrays(group).items():
        if array.size != num_tokens:
            raise MalformedMessage(
                f"Group {group.group_id} has {num_tokens} tokens in completions 0 to {num_completions - 1} "
                f"but {array.size} {name}."
            )


def are_usable(groups: Sequence[Group], vocabulary: int) -> bool:
    return (
        are_ids([group.prompt_ids for group in groups], MAX_COUNT + 1)
        and are_ids([group.completion_ids for group in groups], vocabulary)
        and are_within([group.logprobs for group in groups], MIN_LOGPROB, MAX_LOGPROB)
        and are_within([group.entropies for group in groups], -MAX_LOGPROB, MAX_ENTROPY)
        and are_within([group.teacher for group in groups], MIN_LOGPROB, MAX_LOGPROB)
        and all(map(has_usable_mask, groups))
    )


def are_ids(arrays: Sequence[NDArray[np.int32]], end: int) -> bool:
    """Whether 0 <= all of them < end. A negative one is a large one without its sign."""
    return bool(np.concatenate(arrays).view(np.uint32).max(initial=0) < end)


def are_within(arrays: Sequence[NDArray[np.float32] | None], low: float, high: float) -> bool:
    """Comparisons with NaN are false."""
    given = [array for array in arrays if array is not None]
    values = np.concatenate(given) if given else np.zeros(0, np.float32)
    return bool(values.min(initial=high) >= low and values.max(initial=low) <= high)


def has_usable_mask(group: Group) -> bool:
    return group.trained is None or not any(bad.any() for bad in mask_faults(group).values())


def mask_faults(group: Group) -> dict[str, NDArray[np.bool_]]:
    """[S] bool by what is wrong there; nothing where all tokens were sampled."""
    if group.trained is None:
        return {}
    given = group.trained == 0
    last = np.zeros(given.shape, np.bool_)
    ends = np.cumsum(group.lengths)[np.array(group.lengths) > 0] - 1
    last[ends] = True
    faults = {
        "a value in trained that is neither 0 nor 1": group.trained > 1,
        "a last token that was not sampled": given & last,
        "a log-prob for a token that was not sampled": given & (group.logprobs != 0),
    }
    if group.teacher is not None:
        faults["a teacher's log-prob for a token that was not sampled"] = given & (group.teacher != 0)
    if group.entropies is not None:
        faults["an entropy for a token that was not sampled"] = given & (group.entropies != 0)
    return faults


def refuse_wrong_value(group: Group, vocabulary: int) -> None:
    if (group.prompt_ids < 0).any():
        raise MalformedMessage(f"Group {group.group_id} has a negative token id in its prompt.")
    refuse(group, group.completion_ids < 0, "a negative token id")
    refuse(group, group.completion_ids >= vocabulary, f"a token id that is not below {vocabulary}")
    for name in ("logprobs", "entropies", "teacher"):
        if name in (arrays := token_arrays(group)):
            refuse(group, ~np.isfinite(arrays[name]), f"a value that is not finite in {name}")
    refuse(group, group.logprobs > MAX_LOGPROB, f"a log-prob above {MAX_LOGPROB}")
    refuse(group, group.logprobs < MIN_LOGPROB, f"a log-prob below {MIN_LOGPROB:g}")
    if group.teacher is not None:
        refuse(group, group.teacher > MAX_LOGPROB, f"a teacher's log-prob above {MAX_LOGPROB}")
        refuse(group, group.teacher < MIN_LOGPROB, f"a teacher's log-prob below {MIN_LOGPROB:g}")
    for what, bad in mask_faults(group).items():
        refuse(group, bad, what)
    if group.entropies is not None:
        refuse(group, group.entropies > MAX_ENTROPY, f"an entropy above {MAX_ENTROPY:g}")
        refuse(group, group.entropies < -MAX_LOGPROB, "a negative entropy")


def token_arrays(group: Group) -> dict[str, NDArray[np.int32] | NDArray[np.float32] | NDArray[np.uint8]]:
    """The arrays with one number per token, without those that the group does not have."""
    arrays = {
        "completion_ids": group.completion_ids,
        "trained": group.trained,
        "logprobs": group.logprobs,
        "entropies": group.entropies,
        "teacher": group.teacher,
    }
    return {name: array for name, array in arrays.items() if array is not None}


def refuse(group: Group, bad_S: NDArray[np.bool_], what: str) -> None:
    """MalformedMessage that names the completion of the first bad token, if there is one."""
    if bad_S.any():
        token = int(bad_S.argmax())
        completion = int(np.searchsorted(np.cumsum(group.lengths), token, side="right"))
        raise MalformedMessage(
            f"Group {group.group_id}, completion {completion} has {what} (token {token} of the group)."
        )
