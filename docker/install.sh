#!/bin/sh
# Run while an image is built: a venv in /opt/tandem with the dependencies that pyproject.toml names.
set -eu
python3 -m venv /opt/tandem
/opt/tandem/bin/python - >/build/requirements.txt <<'PYTHON'
import tomllib

with open("/build/pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["dependencies"]))
PYTHON
/opt/tandem/bin/python -m pip install --no-cache-dir --disable-pip-version-check -r /build/requirements.txt
