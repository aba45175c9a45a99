"""A model's architecture, built by transformers without weights, or refused in one sentence.

A policy needs a decoder in which every matrix of a layer is an `nn.Linear`, attention that goes through transformers'
attention interface, and logits of the form in shared/model/head.py. There is no list of architectures that are computed
correctly: shared/base/load.py compares each with its own class. This module refuses what cannot work at all, before a
large model is quantised. Dropout is always off, also if config.json says otherwise, because it would make the
numbers of the two processes differ.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import __version__ as transformers_version

from shared.errors import ModelError, in_words
from shared.model.head import PLAIN, LogitForm
from shared.model.layers.attention import install_attention
from shared.model.layers.linears import is_decoder_linear

LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that the caches support."""
UNFIT = (AttributeError, ImportError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Exceptions that the code of an architecture raises when it does not support the way it is used."""


def unsupported(model_type: str, reason: str) -> ModelError:
    return ModelError(
        f"Model type '{model_type}' is not supported: {reason}; choose a dense decoder such as Llama, Qwen, Mistral,"
        " Gemma, Granite, Cohere, Phi or OLMo."
    )


def read_architecture(folder: Path) -> Any:
    """The model's transformers configuration, without dropout and without quantisation, which is done here."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (*UNFIT, OSError) as error:
        raise ModelError(
            f"{folder / 'config.json'} is not a configuration that transformers {transformers_version} knows:"
            f" {in_words(error)}; check model.path, or choose another model."
        ) from error
    return without_extras(config)


def architecture_of(facts: Mapping[str, Any]) -> Any:
    """The same from the content of a config.json."""
    kind = str(facts.get("model_type"))
    try:
        return without_extras(AutoConfig.for_model(**facts))
    except UNFIT as error:
        raise unsupported(kind, f"transformers {transformers_version} does not know it ({in_words(error)})") from error


def without_extras(config: Any) -> Any:
    config.__dict__.pop("quantization_config", None)
    for name, value in vars(config).items():
        if "drop" in name and type(value) in (int, float):
            setattr(config, name, type(value)(0))
    return config


def empty_model(config: Any) -> Any:
    """The architecture without weights, eval mode; computed buffers (rotary tables, embedding scales) are real."""
    refuse_parts(config)
    hook = register_module_parameter_registration_hook(without_values)  # pyright: ignore[reportArgumentType]
    try:
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=False, attn_implementation=install_attention())
    except KeyError as error:
        raise unsupported(config.model_type, "its class computes attention in a way of its own") from error
    except torch.OutOfMemoryError:
        raise
    except UNFIT as error:
        raise unsupported(
            config.model_type, f"transformers cannot build it for this use ({in_words(error)})"
        ) from error
    finally:
        hook.remove()
    refuse_layers(lm)
    return lm.eval().requires_grad_(False)


def without_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Move a parameter to the meta device as it is registered, before its values are written."""
    if parameter is None or parameter.is_meta:
        return None
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def refuse_parts(config: Any) -> None:
    if config.is_encoder_decoder:
        raise unsupported(config.model_type, "it has an encoder")
    if config.get_text_config() is not config:
        raise unsupported(
            config.model_type, "its language model is a part of a larger one, which also takes images or sound"
        )
    if others := set(getattr(config, "layer_types", None) or ()) - LAYERS:
        raise unsupported(
            config.model_type, f"it has layers of kind '{min(others)}', and only attention is computed here"
        )


def refuse_layers(lm: Any) -> None:
    linears, kind = decoder_linears(lm).keys(), lm.config.model_type
    parameters = dict(lm.named_parameters())
    if any("expert" in name for name in parameters):
        raise unsupported(kind, "it is a mixture of experts, and each token would train only a few of them")
    if any(name.endswith("sinks") for name in parameters):
        raise unsupported(kind, "its attention has sinks, which are not computed here")
    matrices = {
        name.removesuffix(".weight") for name, value in parameters.items() if is_decoder_linear(name, value.dim())
    }
    if others := matrices - linears:
        raise unsupported(kind, f"'{min(others)}' in its layers is a matrix but not an nn.Linear")
    if not isinstance(lm.get_output_embeddings(), nn.Linear) or not hasattr(lm, lm.base_model_prefix):
        raise unsupported(kind, "it is not made of a decoder and one output matrix")
    if not linears:
        raise unsupported(kind, "none of its layers is made of nn.Linear")


def decoder_linears(lm: Any) -> dict[str, nn.Linear]:
    return {
        name: module
        for name, module in lm.named_modules()
        if isinstance(module, nn.Linear) and is_decoder_linear(f"{name}.weight", 2)
    }


def logit_form(lm: Any) -> LogitForm:
    """How the model turns W h into logits, by the keys that transformers' configurations use for it."""
    config, bias = lm.config, lm.get_output_embeddings().bias
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    cap = getattr(config, "final_logit_softcapping", None)
    plain = bias is None and scale == 1 and cap is None
    return PLAIN if plain else LogitForm(bias=None if bias is None else bias.detach(), scale=float(scale), cap=cap)
