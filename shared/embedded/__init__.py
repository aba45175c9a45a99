"""The model that ships with Tandem, so that a first run needs no download, no graphics card and no account.

`model/` holds a Qwen2-architecture policy of about 0.85 M parameters with its tokenizer.
`python -m benchmarks.embedded.make_model` makes it again from nothing. Its tasks, arithmetic word problems of three
levels, are drawn by learner/tasks/word_problems.py. This module loads no torch.
"""

from pathlib import Path

EMBEDDED_DIR: Path = Path(__file__).parent / "model"
"""Folder of the model, in Hugging Face format."""
