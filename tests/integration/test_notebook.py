"""The notebook, executed from its first cell to its last, with a short run."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import ROOT, SMALL, rows, sets

NOTEBOOK = ROOT / "launch" / "examples" / "first_run.ipynb"
NEEDED = ("nbclient", "nbformat", "ipykernel")


def shortened(notebook: Any, run: Path) -> Any:
    """With other parameters: a few steps of a few prompts, in another folder."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert 'SETTINGS = ["--steps", "40"]' in cell.source
    settings = sets(SMALL | {"run.steps": 3})
    cell.source = f"RUN = {json.dumps(str(run))}\nSETTINGS = {json.dumps(settings)}"
    return notebook


def outputs(notebook: Any, cell_id: str) -> str:
    """All that a cell shows, as text and as HTML."""
    (cell,) = [cell for cell in notebook.cells if cell.id == cell_id]
    shown = [output.get("text") or "".join(output.data.values()) for output in cell.outputs]
    return "".join(shown)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
def test_it_trains_plots_chats_and_exports(tmp_path: Path) -> None:
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed; `pip install -e '.[notebook]'` does that")
    import nbclient  # pyright: ignore[reportMissingImports]
    import nbformat  # pyright: ignore[reportMissingImports]

    run = tmp_path / "run"
    notebook = shortened(nbformat.read(NOTEBOOK, as_version=4), run)
    nbformat.validate(notebook)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=os.environ | {"PYTHONPATH": path, "IPYTHONDIR": str(tmp_path / "ipython")})

    assert len(rows(run)) == 3
    trained = outputs(notebook, "train")
    assert "done: 3 steps" in trained
    assert "\x1b" not in trained and len(trained.splitlines()) < 80, "plain lines, not a live display"
    assert outputs(notebook, "plot").count("<polyline") == 2
    assert "too early to say" in outputs(notebook, "why")
    assert outputs(notebook, "chat").count("####") >= 2
    assert json.loads((tmp_path / "run-adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_it_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
    assert len({cell["id"] for cell in cells}) == len(cells)
