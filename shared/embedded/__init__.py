"""The model and the tasks that ship with Tandem: a first run needs no download, no GPU and no account.

`model/` holds a Qwen2-architecture policy of about 0.85 M parameters with its tokenizer. `problems` makes arithmetic
word problems of three levels, `corpus` the texts that the policy was pretrained on (a part of them wrong on purpose),
and `python -m benchmarks.embedded.make_model` makes `model/` again from nothing.

Importing this package, `stories`, `problems` or `corpus` loads no torch.
"""

from pathlib import Path

EMBEDDED_DIR: Path = Path(__file__).parent / "model"
"""Folder of the checkpoint that ships with us, in Hugging Face's layout."""
