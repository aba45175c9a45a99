"""The models that ship with Tandem, so that a first run needs no model download, no graphics card and no account.

    model.path          folder    what it writes
    embedded            model/    solutions of arithmetic word problems (learner/tasks/word_problems.py)
    embedded-tools      tools/    calls of a calculator, and guesses in a game (learner/tasks/number_questions.py)

Both are Qwen2-architecture policies of about 0.85 M parameters with their tokenizers. `benchmarks.embedded.make_model`
and `benchmarks.embedded.make_tool_model` make them again from nothing. This module loads no torch.
"""

from pathlib import Path

EMBEDDED_DIR: Path = Path(__file__).parent / "model"
"""Folder of the first model, in Hugging Face format."""
EMBEDDED: dict[str, Path] = {"embedded": EMBEDDED_DIR, "embedded-tools": EMBEDDED_DIR.with_name("tools")}
"""model.path -> folder."""
