"""Every supported architecture is computed as its own class does, on every path, and what is not supported is refused.

The class's own numbers are those of transformers' `forward` in float64 over a model that transformers loaded
itself, so computed buffers and names of tensors are part of what is compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, LlamaConfig, LlamaForCausalLM

from actor.engines.hf_engine import HFEngine, stream
from protocol.messages import GroupOrder, Sampling
from shared.base.architecture import decoder_linears, empty_model, read_architecture
from shared.base.cache import cached_base
from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import ActorConfig
from shared.errors import ModelError
from shared.model.adapter_file import read_layout
from shared.model.layers.sequences import Sequences
from shared.model.policy import Policy
from tests.support.architectures import REFUSED, SUPPORTED, VOCAB, architecture_model
from tests.support.fakes import RANK, dense_twin, hidden_of, tiny_policy, tiny_prompter, unheard

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS, COMPLETION, OWNER = (7, 12), 9, (0, 0, 1)
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Pair:
    """A policy whose adapter is alive, and its twin in transformers."""

    policy: Policy
    twin: Any
    lora: LoraConfig
    folder: Path

    def leaves(self) -> dict[str, torch.Tensor]:
        """The adapter's tensors for the twin."""
        parameters = self.policy.adapter.parameters()
        return {name: value.detach().double().requires_grad_() for name, value in parameters.items()}

    def logits(self, leaves: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """[B, T] -> [B, T, V] by the twin, the adapter in its weights."""
        weights = {name: value.detach() for name, value in self.twin.named_parameters()}
        for name, layer in self.policy.adapter.layers.items():
            delta = leaves[f"{name}.lora_B"] @ leaves[f"{name}.lora_A"]
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + layer.scale * delta
        return functional_call(self.twin, weights, kwargs={"input_ids": ids, "use_cache": False}).logits


@pytest.fixture(scope="module", params=SUPPORTED)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One architecture, every linear of it with an adapter."""
    folder = architecture_model(tmp_path_factory.mktemp("models"), request.param)
    lora = LoraConfig(rank=RANK, alpha=2.0 * RANK, targets=linear_names(folder))
    twin = dense_twin(folder, attention="eager").double()
    return Pair(tiny_policy(folder, lora=lora), twin, lora, folder)


def linear_names(folder: Path) -> tuple[str, ...]:
    """Last names of the decoder's linears."""
    names = decoder_linears(empty_model(read_architecture(folder)))
    return tuple(sorted({name.rpartition(".")[2] for name in names}))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(sum(shape)))


def compare(pair: Pair, ids: torch.Tensor, hidden: torch.Tensor, rows: list[tuple[int, int]]) -> None:
    """Log-probs at (row, column) of `ids`, and what each adapter's tensor gets of a random sum of them."""
    row, column = torch.tensor(rows).t()
    targets, arriving = ids[row, column], torch.randn(len(rows), generator=torch.Generator().manual_seed(3))
    found = pair.policy.stats(hidden, targets, temperature=TEMPERATURE, rows=5).logprobs
    leaves = pair.leaves()
    all_logprobs = torch.log_softmax(pair.logits(leaves, ids) / TEMPERATURE, dim=-1)
    expected = all_logprobs[row, column - 1].gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    parameters = pair.policy.adapter.parameters()
    ours = torch.autograd.grad(found @ arriving, list(parameters.values()))
    theirs = torch.autograd.grad(expected @ arriving.double(), list(leaves.values()))
    for name, mine, exact in zip(leaves, ours, theirs, strict=True):
        assert exact.abs().max() > 1e-6, name
        assert (mine - exact).abs().max() <= 1e-4 * exact.abs().max(), name


@pytest.mark.one_in(3)
def test_whole_rows_and_their_gradient_are_those_of_the_class(pair: Pair) -> None:
    ids = drawn(3, 21)
    hidden = hidden_of(pair.policy, ids)[:, :-1].flatten(0, 1)
    compare(pair, ids, hidden, [(row, column) for row in range(3) for column in range(1, 21)])


@pytest.mark.parametrize("recompute", [False, True])
def test_shared_prompts_and_their_gradient_are_those_of_the_class(pair: Pair, recompute: bool) -> None:
    if recompute:
        policy = tiny_policy(pair.folder, lora=pair.lora)
        policy.recompute_activations()
        pair = replace(pair, policy=policy)
    prompts, completions = [drawn(length) for length in LENGTHS], drawn(len(OWNER), COMPLETION)
    lengths, owner = torch.tensor(LENGTHS), torch.tensor(OWNER)
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    hidden = pair.policy.hidden(Sequences(prompts=padded, lengths=lengths, completions=completions, owner=owner))
    before, after = hidden.split([padded.numel(), completions.numel()])
    last = before.unflatten(0, padded.shape)[owner, lengths[owner] - 1]
    rows = torch.cat([last[:, None], after.unflatten(0, completions.shape)[:, :-1]], dim=1)
    whole = [torch.cat([prompts[o], completion]) for o, completion in zip(OWNER, completions, strict=True)]
    places = [(row, LENGTHS[o] + column) for row, o in enumerate(OWNER) for column in range(COMPLETION)]
    compare(pair, torch.nn.utils.rnn.pad_sequence(whole, batch_first=True), rows.flatten(0, 1), places)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [0, 4])
@torch.no_grad()
def test_decoded_completions_have_the_classs_log_probs(pair: Pair, width: int) -> None:
    """Nine completions: all at once, or four rows that are taken over at different times."""
    engine = HFEngine(pair.policy, tiny_prompter(*range(3)), ActorConfig(max_sequences=width))
    sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=14)
    groups = tuple(
        GroupOrder(group_id=f"g{n}", prompt_ids=drawn(n).int().numpy(), columns={}, seeds=(1, 2, 3)) for n in (3, 8, 11)
    )
    leaves, lengths = pair.leaves(), set[int]()
    for group, completions in zip(groups, engine.generate(groups, sampling, unheard), strict=True):
        for completion in completions:
            lengths.add(len(completion.ids))
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, completion.ids])).long()[None]
            logits = pair.logits(leaves, ids)[0, len(group.prompt_ids) - 1 : -1] / TEMPERATURE
            expected = torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(group.prompt_ids) :, None]).squeeze(1)
            np.testing.assert_allclose(completion.logprobs, expected.numpy(), rtol=0, atol=1e-4)
    assert max(lengths) == 14


def test_a_completion_that_is_read_along_is_the_one_of_the_decode_loop(pair: Pair) -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=12)
    group = GroupOrder(group_id="g", prompt_ids=drawn(9).int().numpy(), columns={}, seeds=(5,))
    ((completion,),) = HFEngine(pair.policy, tiny_prompter()).generate((group,), sampling, unheard)
    assert list(stream(pair.policy, group.prompt_ids.tolist(), (), sampling, seed=5)) == completion.ids.tolist()


def test_recomputed_activations_change_nothing(pair: Pair) -> None:
    ids, parameters = drawn(2, 17), list(pair.policy.adapter.parameters().values())
    plain = hidden_of(pair.policy, ids)
    again_policy = tiny_policy(pair.folder, lora=pair.lora)
    again_policy.recompute_activations()
    again = hidden_of(again_policy, ids)
    assert torch.equal(again, plain)
    ours = torch.autograd.grad(again.square().sum(), list(again_policy.adapter.parameters().values()))
    for mine, exact in zip(ours, torch.autograd.grad(plain.square().sum(), parameters), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


def test_the_layout_read_from_the_file_is_that_of_the_policy(pair: Pair) -> None:
    layout = read_layout(base_of(pair.folder).folder, pair.lora)
    found = {name: tuple(value.shape) for name, value in pair.policy.adapter.parameters().items()}
    assert layout.shapes == found


def test_all_linears_are_quantised_and_an_actor_may_serve(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fresh = tiny_policy(pair.folder, lora=pair.lora, shaken=False)
    assert f"{len(pair.policy.adapter.layers)} linears are NF4 and 0 are left dense" in caplog.text
    HFEngine(fresh, tiny_prompter()).check()


def base_of(folder: Path) -> Any:
    return cached_base(ModelConfig(path=str(folder), cache_dir=str(folder.parent / "cache")))


def test_linears_outside_the_layers_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = architecture_model(tmp_path, "OPT", word_embed_proj_dim=32)
    with caplog.at_level("INFO"):
        tiny_policy(folder, lora=LoraConfig(rank=RANK, targets=("q_proj", "fc1")))
    assert "24 linears are NF4 and 2 are left dense: 1 project_in, 1 project_out" in caplog.text


DROPOUT: dict[str, Any] = {
    "Qwen2": {"attention_dropout": 0.5},
    "Phi": {"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "Phi3": {"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "OPT": {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5},
    "Granite": {"attention_dropout": 0.5},
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_off_with_recomputed_activations_too(tmp_path: Path, name: str) -> None:
    folder = architecture_model(tmp_path, name, **DROPOUT[name])
    policy, ids = tiny_policy(folder, lora=LoraConfig(rank=RANK, targets=linear_names(folder))), drawn(2, 17)
    plain = hidden_of(policy, ids)
    policy.recompute_activations()
    assert torch.equal(hidden_of(policy, ids), plain)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    settings, sentence = REFUSED[name]
    folder = architecture_model(tmp_path, name, settings)
    with pytest.raises(ModelError, match=f"^Model type {sentence}[^\n]*; choose a dense decoder[^\n]*$"):
        tiny_policy(folder, lora=LoraConfig(rank=RANK, targets=("dense",)))


def test_a_model_that_sees_images_is_refused_before_it_is_built() -> None:
    with pytest.raises(ModelError, match="'gemma3' is not supported: its language model is a part of a larger one"):
        empty_model(Gemma3Config())


def test_a_mixture_of_experts_is_refused_before_it_is_quantised(tmp_path: Path) -> None:
    folder = architecture_model(tmp_path, "Mixtral", REFUSED["Mixtral"][0])
    with pytest.raises(ModelError, match="mixture of experts"):
        base_of(folder)
    assert not list(tmp_path.glob("cache/*/*.safetensors"))


def test_a_model_type_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    folder = architecture_model(tmp_path, "Llama")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"lama"'))
    with pytest.raises(ModelError, match=r"not a configuration that transformers 5[^\n]*`lama`"):
        tiny_policy(folder)


class LoudConfig(LlamaConfig):
    """A Llama by another name."""

    model_type = "loud"


class Loud(LlamaForCausalLM):
    """What it makes of its logits is in no configuration."""

    config_class = LoudConfig  # pyright: ignore[reportAssignmentType]

    def forward(self, *args: Any, **options: Any) -> Any:
        output = super().forward(*args, **options)
        assert output.logits is not None
        output.logits *= 1.02
        return output


class HastyConfig(LlamaConfig):
    """A Llama by another name."""

    model_type = "hasty"


class Hasty(LlamaForCausalLM):
    """Single tokens, as in decoding, come out another way."""

    config_class = HastyConfig  # pyright: ignore[reportAssignmentType]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.register_forward_hook(self.hurry)

    def hurry(self, module: object, inputs: object, output: Any) -> None:
        if output.last_hidden_state.shape[1] == 1:
            output.last_hidden_state *= 1.02


class FussyConfig(LlamaConfig):
    """A Llama by another name."""

    model_type = "fussy"


class Fussy(LlamaForCausalLM):
    """It wants more of a cache than ours can do."""

    config_class = FussyConfig  # pyright: ignore[reportAssignmentType]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.register_forward_pre_hook(self.ask, with_kwargs=True)

    def ask(self, module: object, inputs: object, options: Any) -> None:
        if options.get("past_key_values") is not None:
            options["past_key_values"].crop(3)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of three models whose classes compute what this package does not."""
    folder = tmp_path_factory.mktemp("planted")
    for config, model in ((LoudConfig, Loud), (HastyConfig, Hasty), (FussyConfig, Fussy)):
        AutoConfig.register(config.model_type, config)
        AutoModelForCausalLM.register(config, model)
        source = architecture_model(folder, "Llama")
        source = source.rename(folder / config.model_type)
        file = source / "config.json"
        file.write_text(file.read_text().replace('"llama"', f'"{config.model_type}"'))
    yield folder


def test_a_class_that_computes_something_else_is_refused(planted: Path) -> None:
    sentence = r"^Model type 'loud' is not supported: over whole sequences log-probs differ .* own Loud by up to"
    with pytest.raises(ModelError, match=sentence):
        tiny_policy(planted / "loud")


def test_a_class_that_decodes_something_else_is_refused_by_the_actor(planted: Path) -> None:
    policy = tiny_policy(planted / "hasty", shaken=False)
    with pytest.raises(ModelError, match=r"^Model type 'hasty' is not supported: over sequences that are decoded"):
        HFEngine(policy, tiny_prompter()).check()


def test_a_class_that_wants_another_cache_is_refused_in_words(planted: Path) -> None:
    with pytest.raises(
        ModelError, match=r"^Model type 'fussy' is not supported: its code cannot run over shared prompts"
    ):
        tiny_policy(planted / "fussy")


def test_windows_are_as_they_were_after_the_check(tmp_path: Path) -> None:
    policy = tiny_policy(architecture_model(tmp_path, "Gemma2"))
    windows = [layer.self_attn.sliding_window for layer in policy.lm.model.layers]
    assert policy.lm.config.sliding_window == 6 and windows == [6, None, 6, None]
