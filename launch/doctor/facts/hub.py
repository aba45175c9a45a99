"""What the Hugging Face hub says about a model that is not here yet. The only look that uses a network.

A hub that cannot be reached is no answer: the error is left to raise, and becomes the reason why there is none.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.config import ModelConfig

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TIMEOUT_S = 4.0


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Its answer."""

    found: bool
    """Model and revision exist, and are not hidden from this token."""
    gated: bool
    """Access has to be granted by its owner."""
    admitted: bool
    """The token here may fetch it."""
    token: bool
    """There is a token."""
    num_bytes: int | None
    """Of its weight files; None if the hub did not say."""


def look_at_hub(model: ModelConfig, endpoint: str | None = None) -> Hub:
    """One question, and a second one where the model is gated. Without an endpoint, the one that is configured."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    token, hub = get_token() is not None, HfApi(endpoint)
    try:
        info = hub.model_info(model.path, revision=model.revision, timeout=TIMEOUT_S, files_metadata=True)
    except GatedRepoError:
        return Hub(found=True, gated=True, admitted=False, token=token, num_bytes=None)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
        return Hub(found=False, gated=False, admitted=False, token=token, num_bytes=None)
    sizes = [file.size or 0 for file in info.siblings or [] if file.rfilename.endswith(".safetensors")]
    gated = bool(info.gated)
    return Hub(
        found=True,
        gated=gated,
        admitted=not gated or admitted(model, hub),
        token=token,
        num_bytes=sum(sizes) or None,
    )


def admitted(model: ModelConfig, hub: "HfApi") -> bool:
    """Whether the hub would hand the files to this token."""
    from huggingface_hub.errors import GatedRepoError

    try:
        hub.auth_check(model.path)
    except GatedRepoError:
        return False
    return True
