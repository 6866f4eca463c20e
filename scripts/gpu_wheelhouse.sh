#!/usr/bin/env bash
# Make the wheels that a borrowed GPU machine lacks, with dpvision's own, in an ignored folder; print the one command to run there.
#
#     scripts/gpu_wheelhouse.sh [FOLDER=carry/wheels] [PYTHON=3.12]
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-carry/wheels} python=${2:-3.12}
make --silent setup
.venv/bin/python -m pip --version >/dev/null
rm -rf "$folder" build
mkdir -p "$folder"
.venv/bin/uv build --quiet --wheel --out-dir "$folder" .
rm -f "$folder/.gitignore"
.venv/bin/python scripts/gpu_wheels.py collect "$folder" --python "$python"
cat <<END

On the machine, in this folder's copy; a second call goes on where the first one stopped:

python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/site $folder/*.whl && export PYTHONPATH=/tmp/site \\
  && python3 benchmarks/gpu_acceptance.py --minutes 9 --out carry/acceptance; status=\$?; cp carry/acceptance/* "\${OUT:-.}"; (exit \$status)
END
