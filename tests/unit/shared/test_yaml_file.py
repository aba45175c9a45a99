"""A configuration in YAML means what it means in TOML, and what is wrong in it is said with its line."""

from pathlib import Path

import pytest

from shared.config.load import read_config
from shared.errors import ConfigError

TOML = """
[optimizer]
lr = 1e-5
[rollout]
group = 4
temperature = 0.9
[lora]
targets = ["q_proj", "v_proj"]
[verifier]
strict = true
kind = "gsm8k"
[verifier.rewards]
think_tags = 0.5
[tasks]
system_prompt = "no"
"""
YAML = """
optimizer:
  lr: 1e-5        # a text in YAML 1.1
rollout: {group: 4, temperature: 0.9}
lora:
  targets: [q_proj, v_proj]
verifier:
  strict: true
  kind: gsm8k
  rewards:
    think_tags: 0.5
tasks:
  system_prompt: no
"""


def written(folder: Path, text: str, name: str = "my.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_same_configuration_in_both_forms(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, YAML)) == read_config(written(tmp_path, TOML, "my.toml"))
    assert all(read_config(written(tmp_path, YAML, name)).optimizer.lr == 1e-5 for name in ("my.yml", "MY.YML"))
    assert read_config(written(tmp_path, "")) == read_config(written(tmp_path, "", "my.toml"))


def test_set_is_applied_on_top(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, YAML), ["rollout.group=6"]).rollout.group == 6


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run:\n  steps: 3\n bad: 1\n", "line 3"),
        ("run:\n  steps: [3\n", "is not valid YAML: "),
        ("run:\n  steps: 3\n  steps: 4\n", "'steps' is given twice (at line 3, column 3)"),
        ("run: &a {steps: 3}\nloss: *a\n", "aliases are not read (at line 2, column 7)"),
        ("run: !!python/object:os.system {}\n", "could not determine a constructor"),
        ("- run\n", "expected sections"),
        ("run:\n  stepps: 3\n", "Unknown key 'run.stepps'; did you mean 'run.steps'?"),
        ("run:\n  steps: yes\n", 'run.steps = "yes" is not allowed'),
        ("run: 3\n", "'run' got 3, expected a section"),
        ("optimizer:\n  lr: .nan\n", "expected a finite number"),
        ("\x00", "is not valid YAML"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(written(tmp_path, text))
    assert says in str(error.value)
    assert "\n" not in str(error.value)
