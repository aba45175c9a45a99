"""The other side of `window gradio`: a table of runs and an answer with coloured tokens, of Gradio's components.

Both are its own: `Dataframe`, and `HighlightedText` with a colour for each token. The colours of all tokens of one
answer come with a click, as in Samples. It needs Gradio alone and prints its address as its first line.

    python -P benchmarks/gradio_app.py --runs 50 --tokens 500
"""

import argparse
import os

os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}

import gradio  # pyright: ignore[reportMissingImports]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    args = parser.parse_args()
    rows = [[f"run-{number:02d}", "ended", 0.5 + number / 100, 40, "embedded"] for number in range(args.runs)]

    def answer() -> list[tuple[str, float]]:
        return [(f" token{number}", (number % 10) / 10) for number in range(args.tokens)]

    with gradio.Blocks(analytics_enabled=False) as app:
        gradio.Dataframe(rows, headers=["run", "status", "reward", "steps", "model"])
        shown = gradio.HighlightedText(show_legend=False)
        gradio.Button("show").click(answer, outputs=shown)
    _, address, _ = app.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, footer_links=[])
    print(address, flush=True)
    app.block_thread()


if __name__ == "__main__":
    main()
