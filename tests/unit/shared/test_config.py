"""shared/config/tree.py and shared/config/load.py: every key and default, every way to be wrong, and the sentence for
it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.presets.load import PRESETS_DIR, load_config
from protocol.messages import Outcome
from shared.config.data import VerifierConfig
from shared.config.load import apply_override, config_from_json, config_to_json, resolve, rules_digest
from shared.config.model import ModelConfig, cache_root
from shared.config.processes import EvalConfig
from shared.config.tree import Config, Section
from shared.errors import ConfigError
from tests.support.config_keys import PINNED


def write(tmp_path: Path, text: str) -> str:
    """A TOML file with this text."""
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def with_override(override: str) -> Config:
    """The defaults with one `--set`."""
    tree: dict[str, Any] = {}
    apply_override(tree, override)
    return resolve(tree)


def refusal(override: str) -> str:
    """The sentence that refuses one `--set`."""
    with pytest.raises(ConfigError) as caught:
        with_override(override)
    return str(caught.value)


def sections(config: Config) -> dict[str, Section]:
    """Sections by name, in the order of the tree."""
    return {name: getattr(config, name) for name in config.__struct_fields__}


def test_all_keys_and_defaults_are_pinned() -> None:
    found = {
        f"{name}.{key}": getattr(section, key)
        for name, section in sections(Config()).items()
        for key in section.__struct_fields__
    }
    assert found == PINNED
    assert list(found) == list(PINNED)


def test_every_default_has_the_type_of_its_key() -> None:
    assert resolve(msgspec.to_builtins(Config())) == Config()


def test_sections_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().run.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS_DIR.glob("*.toml")))
def test_every_preset_loads(preset: str) -> None:
    assert isinstance(load_config(preset), Config)


def test_a_file_changes_only_what_it_names(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "[run]\nsteps = 7\n[lora]\ntargets = ['q_proj']\n"))
    assert config.run.steps == 7
    assert config.lora.targets == ("q_proj",)
    assert config.run.seed == 0
    assert config.optimizer == Config().optimizer


def test_overrides_win_over_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    source = write(tmp_path, "[run]\nsteps = 7\nseed = 5\n")
    config = load_config(source, ["run.steps=8", "run.steps=9", "optimizer.lr=3e-4"])
    assert (config.run.steps, config.run.seed, config.optimizer.lr) == (9, 5, 3e-4)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("run.steps=3", "run", "steps", 3),
        (" run.steps = 3 ", "run", "steps", 3),
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ("optimizer.lr=3e-4", "optimizer", "lr", 3e-4),
        ("verifier.strict=true", "verifier", "strict", True),
        ("tasks.levels=[1, 2]", "tasks", "levels", (1, 2)),
        ("tasks.source=my data.jsonl", "tasks", "source", "my data.jsonl"),
        ('model.revision="123"', "model", "revision", "123"),
        ("tasks.system_prompt=a=b", "tasks", "system_prompt", "a=b"),
        ("tasks.system_prompt=", "tasks", "system_prompt", ""),
        ("link.endpoint=tcp://127.0.0.1:5757", "link", "endpoint", "tcp://127.0.0.1:5757"),
    ],
)
def test_override_values_are_read_as_toml_or_taken_as_text(override: str, section: str, key: str, value: Any) -> None:
    assert getattr(getattr(with_override(override), section), key) == value


def test_bytes_that_are_no_text_are_refused() -> None:
    assert "--set tasks.system_prompt got 'caf\\udce9', expected UTF-8" in refusal("tasks.system_prompt=caf\udce9")


@pytest.mark.parametrize("override", ["run.steps", "steps=3", "run.steps.more=3", "=3", ""])
def test_an_override_of_another_form_is_refused(override: str) -> None:
    sentence = refusal(override)
    assert f"--set got '{override}'" in sentence
    assert "section.key=value" in sentence


def test_ranks_of_single_targets() -> None:
    lora = with_override("lora.ranks={q_proj = 4, down_proj = 64}").lora
    assert [lora.rank_of(f"model.layers.0.x.{name}") for name in ("q_proj", "down_proj", "o_proj")] == [4, 64, 16]
    assert lora.largest_rank == 64 and lora.scale_of("x.q_proj") == 32 / 4
    assert msgspec.structs.replace(lora, rslora=True).scale_of("x.down_proj") == 32 / 8
    assert "lora.ranks names 'lm_head', which is not in lora.targets" in refusal("lora.ranks={lm_head = 4}")
    assert "<= 512" in refusal("lora.ranks={q_proj = 513}")
    with pytest.raises(ConfigError, match="vLLM serves an adapter with one"):
        resolve({"lora": {"ranks": {"q_proj": 4}}, "actor": {"engine": "vllm"}})


def test_codes_cannot_be_served_of_a_base_that_has_none() -> None:
    with pytest.raises(
        ConfigError, match=r"actor.weights is 'nf4', which takes an NF4 base, but model.quantization is 'none'"
    ):
        resolve({"actor": {"weights": "nf4"}, "model": {"quantization": "none"}})
    with pytest.raises(ConfigError, match=r"compute.actor_card = 1, but vLLM takes the first card .* CUDA_VISIBLE"):
        resolve({"actor": {"engine": "vllm"}, "compute": {"actor_card": 1}})


@pytest.mark.parametrize(
    ("actor", "urls", "sentence"),
    [
        ("vllm_server", [], "but server.urls is empty; set both, or neither"),
        ("hf", ["http://a:8000/v1"], "server.urls is given and actor.engine is 'hf'; set both, or neither"),
        ("vllm_server", ["a:8000"], r"server.urls has 'a:8000'; expected addresses such as http://host:8000/v1"),
        ("vllm_server", ["http://a/v1", "http://a/v1"], "each of them once"),
    ],
)
def test_servers_are_given_where_they_are_used(actor: str, urls: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve({"actor": {"engine": actor}, "server": {"urls": urls}})


def test_a_run_on_servers() -> None:
    config = resolve({"actor": {"engine": "vllm_server"}, "server": {"urls": ["http://a:8000/v1", "https://b/v1"]}})
    assert config.actor.is_elsewhere and config.server.urls == ("http://a:8000/v1", "https://b/v1")
    assert not Config().actor.is_elsewhere


@pytest.mark.parametrize(
    ("override", "given", "expected"),
    [
        ("run.steps=many", 'run.steps = "many"', "expected `int`, got `str`"),
        ("run.steps=true", "run.steps = true", "expected `int`, got `bool`"),
        ("run.steps=1.5", "run.steps = 1.5", "expected `int`, got `float`"),
        ("model.path=3", "model.path = 3", "expected `str`, got `int`"),
        ("model.revision=2026-01-31", 'model.revision = "2026-01-31"', "expected `str`"),
        ("verifier.strict=1", "verifier.strict = 1", "expected `bool`"),
        ("batch.recompute=true", "batch.recompute = true", "expected `str`, got `bool`"),
        ("lora.targets=q_proj", 'lora.targets = "q_proj"', "expected `array`"),
        ("loss.kind=ppo", 'loss.kind = "ppo"', "invalid enum value 'ppo'"),
    ],
)
def test_a_wrong_type_is_refused_with_path_value_and_expectation(override: str, given: str, expected: str) -> None:
    sentence = refusal(override)
    assert sentence.startswith(f"{given} is not allowed: ")
    assert expected in sentence
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    ("override", "bound"),
    [
        ("run.steps=0", ">= 1"),
        ("run.seed=-1", ">= 0"),
        ("lora.rank=513", "<= 512"),
        ("lora.targets=[]", ">= 1"),
        ("tasks.levels=[1, 4]", "<= 3"),
        ("tasks.levels=[]", ">= 1"),
        ("curriculum.advance_at=1.5", "<= 1.0"),
        ("curriculum.replay=1", "< 1.0"),
        ("rollout.group=1", ">= 2"),
        ("rollout.temperature=0", "> 0.0"),
        ("rollout.temperature=101", "<= 100.0"),
        ("rollout.max_new_tokens=1000001", "<= 1000000"),
        ("eval.max_new_tokens=1000001", "<= 1000000"),
        ("eval.long_cap=1000001", "<= 1000000"),
        ("link.heartbeat_s=3601", "<= 3600.0"),
        ("link.silence_s=86401", "<= 86400.0"),
        ("verifier.workers=65", "<= 64"),
        ("loss.entropy_fraction=0", "> 0.0"),
        ("loss.entropy_fraction=1.1", "<= 1.0"),
        ("loss.clip_low=-0.1", ">= 0.0"),
        ("loss.kl_gradient=k2", "invalid enum value 'k2'"),
        ("verifier.on_timeout=mask", "invalid enum value 'mask'"),
        ("constraint.share=0.6", "<= 0.5"),
        ("optimizer.lr=0", "> 0.0"),
        ("optimizer.beta1=1", "< 1.0"),
        ("optimizer.final_lr_fraction=2", "<= 1.0"),
        ("growth.rate=1", "> 1.0"),
        ("pipeline.max_lag=65", "<= 64"),
        ("link.credits=0", ">= 1"),
        ("compute.actor_threads=257", "<= 256"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_bound(override: str, bound: str) -> None:
    sentence = refusal(override)
    assert sentence.startswith(override.partition("=")[0])
    assert bound in sentence


@pytest.mark.parametrize(
    "override", ["optimizer.lr=inf", "optimizer.lr=nan", "reward.truncated=nan", "reward.truncated=-inf"]
)
def test_a_number_that_is_not_finite_is_refused(override: str) -> None:
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=rf"^{key} = {value} is not allowed: expected a finite number\.$"):
        load_config("embedded", [override])


def test_a_value_where_a_section_belongs_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path, "run = 5\n")
    for overrides in ([], ["run.steps=3"]):
        with pytest.raises(ConfigError, match=r"'run' got 5, expected a section: write \[run\]"):
            load_config(source, overrides)


@pytest.mark.parametrize("text", ["[run\nsteps = 3", "steps = = 3", "[run]\nsteps = 1\nsteps = 2"])
def test_bad_toml_is_refused_with_file_and_line(tmp_path: Path, text: str) -> None:
    source = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert str(caught.value).startswith(f"{source} is not valid TOML: ")
    assert "line" in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(str(path))


def test_a_missing_source_is_refused_with_the_presets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "absent.toml"))
    sentence = str(caught.value)
    assert "absent.toml" in sentence
    for preset in PRESETS_DIR.glob("*.toml"):
        assert preset.stem in sentence


@pytest.mark.parametrize(
    ("outcome", "key", "default"),
    [
        (Outcome.CORRECT, None, "train"),
        (Outcome.WRONG, None, "train"),
        (Outcome.TRUNCATED, "on_truncated", "train"),
        (Outcome.UNPARSABLE, "on_unparsable", "train"),
        (Outcome.TIMEOUT, "on_timeout", "drop"),
        (Outcome.ERROR, "on_error", "stop"),
        (Outcome.ABSTAIN, "on_abstain", "drop"),
    ],
)
def test_each_outcome_is_treated_as_its_own_key_says(outcome: Outcome, key: str | None, default: str) -> None:
    assert VerifierConfig().treatment(outcome) == default
    keys = ["on_truncated", "on_unparsable", "on_timeout", "on_error", "on_abstain"]
    # One key differs from all the others: only its own outcome may notice.
    for changed in keys:
        values = {name: "stop" if name == changed else "drop" for name in keys}
        wanted = "train" if key is None else values[key]
        assert msgspec.convert(values, VerifierConfig).treatment(outcome) == wanted


def test_every_outcome_has_a_treatment() -> None:
    assert all(VerifierConfig().treatment(outcome) in ("train", "drop", "stop") for outcome in Outcome)


def test_json_holds_every_key_and_comes_back_equal() -> None:
    tree: dict[str, Any] = {}
    for override in ["optimizer.lr=0.1", "tasks.levels=[2]", "tasks.system_prompt=Gr\u00fc\u00dfe"]:
        apply_override(tree, override)
    config = resolve(tree)
    data = config_to_json(config)
    assert config_from_json(data) == config
    written = msgspec.json.decode(data)
    assert {f"{section}.{key}" for section, keys in written.items() for key in keys} == set(PINNED)
    assert b"\n" in data


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b'{"run": {"steps": 0}}', "run.steps = 0 is not allowed"),
        (b'{"run": {"stepps": 1}}', "did you mean 'run.steps'"),
        (b'{"run": null}', "expected a section"),
        (b'{"run": ', "is damaged"),
        (b"[]", "is damaged"),
        (b"", "is damaged"),
    ],
)
def test_a_json_tree_is_checked_like_any_other(data: bytes, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_json(data)
    assert part in str(caught.value)


def test_the_rules_of_a_run_are_those_of_drawing_and_judging() -> None:
    def digest(*overrides: str) -> str:
        config = load_config("embedded", overrides)
        return rules_digest(config.verifier, config.rollout, config.environment)

    assert digest() == digest("optimizer.lr=1", "actor.kv_mb=7")
    changes = ["verifier.kind=math", "verifier.rewards={think_tags = 0.5}", "rollout.temperature=0.5"]
    changes.append("environment.max_turns=3")
    assert len({digest(), *map(digest, changes)}) == 5


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_models_are_kept_where_the_key_or_the_environment_says() -> None:
    cache = {"XDG_CACHE_HOME": "/cache"}
    assert cache_root(ModelConfig(cache_dir="here"), cache, no_home) == Path("here")
    assert cache_root(ModelConfig(), cache, no_home) == Path("/cache/tandem")
    for relative in ({"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "cache"}, {}):
        assert cache_root(ModelConfig(), relative, lambda: Path("/home/me")) == Path("/home/me/.cache/tandem")


def test_a_user_without_a_home_is_told_which_keys_help() -> None:
    with pytest.raises(ConfigError, match=r"has no home folder .*; set model.cache_dir, HOME or XDG_CACHE_HOME\.$"):
        cache_root(ModelConfig(), {}, no_home)


def test_evaluations_are_due_every_so_many_steps() -> None:
    assert [step for step in range(1, 7) if EvalConfig(every=3).is_due(step)] == [3, 6]
    assert not any(EvalConfig(every=every, problems=problems).is_due(4) for every, problems in ((0, 9), (2, 0)))


def test_the_largest_step_is_the_first_one_or_the_grown_one() -> None:
    assert resolve({"rollout": {"prompts": 8}}).most_prompts == 8
    assert resolve({"rollout": {"prompts": 8}, "growth": {"max_prompts": 30}}).most_prompts == 30


def test_a_run_can_be_extended_unless_its_last_steps_depend_on_its_end() -> None:
    assert resolve({}).can_be_extended
    assert not resolve({"pipeline": {"max_lag": 1}}).can_be_extended
    assert not resolve({"curriculum": {"kind": "levels"}}).can_be_extended
    assert not any(resolve({"optimizer": {"schedule": kind}}).can_be_extended for kind in ("linear", "cosine"))
    assert resolve({"curriculum": {"kind": "levels", "stage_steps": 5}}).can_be_extended


@pytest.mark.parametrize(("name", "text"), [("a.toml", "[run]\nsteps = 3\n"), ("a.yaml", "run:\n  steps: 3\n")])
def test_the_mark_that_an_editor_puts_before_the_text_is_left_out(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert load_config(str(tmp_path / name)).run.steps == 3
