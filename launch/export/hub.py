"""Push an export to the Hugging Face hub, only when asked.

The token comes from the environment, is asked for before anything is written, and goes nowhere but to the hub.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from shared.errors import ConfigError, RunDirError

TOKEN = "HF_TOKEN"


class Hub(Protocol):
    """The two calls of huggingface_hub.HfApi that are needed."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any:
        """Make it, if it is not there."""
        ...

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> Any:
        """All files of a folder, as one commit."""
        ...


def require_token() -> str:
    """Asked for before anything is written."""
    token = os.environ.get(TOKEN, "")
    if not token:
        raise ConfigError(f"--push needs a token of the hub that may write; set {TOKEN} in the environment.")
    return token


def hub_api(token: str) -> Hub:
    """The hub itself."""
    from huggingface_hub import HfApi

    return HfApi(token=token)


def push(folder: Path, repo: str, message: str, connect: Callable[[], Hub]) -> str:
    """A new repository is private: making it public is a decision of its own. Returns where it lies."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        hub = connect()
        hub.create_repo(repo, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunDirError(
            f"The hub did not take {repo}: {what}; the export is whole in {folder}, push again with"
            f" `hf upload {repo} {folder}`."
        ) from error
    return f"https://huggingface.co/{repo}"
