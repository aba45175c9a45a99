"""The benchmark of prompt forms: every form is a valid configuration, and what is counted."""

import argparse
from pathlib import Path

import pytest

from benchmarks.prompt_forms import FORMS, configured, figures
from protocol.messages import Outcome
from tests.support.wire_examples import group


@pytest.mark.parametrize("forms", FORMS)
def test_every_form_is_a_configuration(forms: str) -> None:
    args = argparse.Namespace(model=Path("m"), set=["tasks.source=data"] if forms == "gsm8k" else [])
    for form in FORMS[forms].values():
        config = configured(form, args)
        assert config.model.path == "m" and not config.verifier.strict
        assert config.tasks.few_shot == form.get("tasks.few_shot", 0)
        assert config.tasks.source == form.get("tasks.source", "data" if forms == "gsm8k" else "embedded")


def test_shares_are_of_answers_and_of_groups() -> None:
    wrong = group(outcomes=(Outcome.WRONG, Outcome.UNPARSABLE, Outcome.TRUNCATED))
    found = figures([group(), wrong])
    assert (found["problems"], found["answers"], found["mixed_groups"]) == (2, 6, 0.5)
    assert (found["right"], found["cut_off"]) == (round(1 / 6, 3), round(2 / 6, 3))
    assert (found["tokens"], found["prompt_tokens"]) == (1.0, 2.0)
    assert found["low"] < found["right"] < found["high"]
