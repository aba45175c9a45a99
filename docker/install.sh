#!/bin/sh
# Run while an image is built: a venv in /opt/tandem with the dependencies that pyproject.toml names, and those of the
# extras that are given.
set -eu
python3 -m venv /opt/tandem
/opt/tandem/bin/python - "$@" >/build/requirements.txt <<'PYTHON'
import sys
import tomllib

with open("/build/pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
for names in (project["dependencies"], *(project["optional-dependencies"][extra] for extra in sys.argv[1:])):
    print("\n".join(names))
PYTHON
/opt/tandem/bin/python -m pip install --no-cache-dir --disable-pip-version-check -r /build/requirements.txt
